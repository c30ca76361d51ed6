"""What SparseAllGather moves, device to device; SparseReduceScatter is its transpose.

Shape letters: E experts, D devices, P pairs of expert and device.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_fssdp.planning.placement.kept_results import kept_on
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_growth import TransferGrowth


class TransferEdge(NamedTuple):
    """One expert's parameters going from one device to another.

    Attributes:
        expert: The expert.
        source: Device that sends; it has the expert before.
        destination: Device that receives.
        depth: Hops from the owner, or another device that has the expert, to ``destination``, less one.
    """

    expert: int
    source: int
    destination: int
    depth: int


@dataclass(frozen=True)
class TransferPlan:
    """The transfers of one layer, parents before children.

    Construction proves that every expert's edges form one tree: its root (the owner) is
    never a destination, every other device receives once, nobody sends before it has the
    expert, and depths count hops from the root. With ``present_before`` they form a tree for
    each device that sends what it had before.

    Attributes:
        num_devices: Number of devices, D.
        edges: The transfers; an edge comes after the edge that feeds its source.
        present_before: The (expert, device) pairs from which the trees may start, for a plan that
            only adds to what is there; None: each expert's own tree, from its owner alone.
    """

    num_devices: int
    edges: tuple[TransferEdge, ...]
    present_before: frozenset[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        num_devices, is_rooted = self.num_devices, self.present_before is None
        depth_of: dict[int, int] = {}  # expert * D + device -> depth, -1 at the root
        rooted: dict[int, int] = {}
        for expert, device in self.present_before or ():
            depth_of[expert * num_devices + device] = -1
        for edge in self.edges:
            expert, source, destination, depth = edge
            if not (0 <= source < num_devices and 0 <= destination < num_devices and expert >= 0):
                raise ValueError(f"{edge} leaves the plan: wanted devices from 0 to {num_devices - 1}")
            key = expert * num_devices + source
            if key not in depth_of:
                if not is_rooted:
                    raise ValueError(
                        f"{edge} sends an expert its source does not have yet: wanted a source that is in "
                        "present_before or the destination of an earlier edge"
                    )
                if expert in rooted:
                    raise ValueError(
                        f"{edge} sends an expert its source does not have yet: wanted a source that is the "
                        f"owner ({rooted[expert]}) or the destination of an earlier edge"
                    )
                rooted[expert] = source
                depth_of[key] = -1
            target = expert * num_devices + destination
            if target in depth_of:
                raise ValueError(
                    f"{edge} sends expert {expert} to device {destination}, which already has it: wanted "
                    "every holder to receive once and the owner never"
                )
            if depth != depth_of[key] + 1:
                raise ValueError(f"{edge} has depth {depth}: wanted {depth_of[key] + 1}")
            depth_of[target] = depth

    def check_serves(self, placement: ExpertPlacement) -> None:
        """Raises ValueError unless the edges bring every expert from its owner to all its holders."""
        owners = placement.owner_E.tolist()
        got_ED = np.zeros_like(placement.present_ED)
        got_ED[np.arange(placement.num_experts), owners] = True
        for edge in self.edges:
            if edge.depth == 0 and edge.source != owners[edge.expert]:
                raise ValueError(
                    f"{edge} starts on device {edge.source}: wanted the owner of expert {edge.expert}, "
                    f"device {owners[edge.expert]}"
                )
            got_ED[edge.expert, edge.destination] = True
        if not np.array_equal(got_ED, placement.present_ED):
            expert, device = (int(i) for i in np.argwhere(got_ED != placement.present_ED)[0])
            raise ValueError(
                f"expert {expert} {'reaches' if got_ED[expert, device] else 'does not reach'} device "
                f"{device}: wanted transfers to exactly the placement's replicas; rebuild the plan for this "
                "placement"
            )

    @property
    def num_transfers(self) -> int:
        """Number of edges; one a replica."""
        return len(self.edges)

    @cached_property
    def max_depth(self) -> int:
        """Depth of the deepest edge; -1 when nothing moves."""
        return max((edge.depth for edge in self.edges), default=-1)

    @cached_property
    def _edges_by_device(self) -> dict[int, tuple[list[TransferEdge], list[TransferEdge]]]:
        by_device: dict[int, tuple[list[TransferEdge], list[TransferEdge]]] = {}
        for edge in self.edges:
            by_device.setdefault(edge.destination, ([], []))[0].append(edge)
            by_device.setdefault(edge.source, ([], []))[1].append(edge)
        return by_device

    def edges_of(self, device: int) -> tuple[tuple[TransferEdge, ...], tuple[TransferEdge, ...]]:
        """A device's (incoming, outgoing) edges in the order of the plan."""
        incoming, outgoing = self._edges_by_device.get(device, ((), ()))
        return tuple(incoming), tuple(outgoing)

    @cached_property
    def _parent_of(self) -> dict[tuple[int, int], int]:
        return {(edge.expert, edge.destination): edge.source for edge in self.edges}

    @cached_property
    def _children_of(self) -> dict[tuple[int, int], list[int]]:
        children: dict[tuple[int, int], list[int]] = {}
        for edge in self.edges:
            children.setdefault((edge.expert, edge.source), []).append(edge.destination)
        return children

    def parent(self, expert: int, device: int) -> int | None:
        """The device that sends an expert to a device; None when nobody does."""
        return self._parent_of.get((expert, device))

    def children(self, expert: int, device: int) -> tuple[int, ...]:
        """The devices a device sends an expert to, in the order of the plan."""
        return tuple(self._children_of.get((expert, device), ()))

    def total_bytes(self, expert_bytes: int) -> int:
        """Bytes moved by all transfers together."""
        return self.num_transfers * expert_bytes

    def inter_node_bytes(self, expert_bytes: int, topology: Topology) -> int:
        """Bytes that cross from one node to another."""
        node_of = topology.node_of_device
        return expert_bytes * sum(node_of[edge.source] != node_of[edge.destination] for edge in self.edges)


def plain_transfer(placement: ExpertPlacement) -> TransferPlan:
    """Every owner sends to each holder itself: one hop, the owner's link carries all (Hecate, §5.1)."""
    owners = placement.owner_E.tolist()
    expert_P, device_P = np.nonzero(placement.present_ED)
    return TransferPlan(
        placement.num_devices,
        tuple(
            TransferEdge(expert, owners[expert], device, 0)
            for expert, device in zip(expert_P.tolist(), device_P.tolist(), strict=True)
            if device != owners[expert]
        ),
    )


def two_level_transfer(placement: ExpertPlacement, topology: Topology) -> TransferPlan:
    """Each expert crosses the slow links once per node that needs it, then spreads inside the node.

    Between nodes: a chain over the nodes' leaders, the owner first, then the other nodes in
    cyclic order of node number after the owner's. A chain, because each NIC then carries an
    expert once in and once out. The leader of another node is the holder that is the owner or
    a leader of the fewest experts so far (ties: the lowest), so that no device's link carries the
    traffic of all: experts in ascending order, owners counted first.

    Inside a node: a binary tree in cyclic order of device number from the leader on, in which every
    holder forwards to at most two others. Against a star, no device's link carries an expert
    more than twice, which matters when many experts share a leader; against a chain, the
    depth grows with the logarithm of the node, not its size. Edges of one depth are listed
    inter-node first, so a leader's hop to the next node starts before its own node's.
    """
    return kept_on(placement, topology, _two_level_transfer)


def _two_level_transfer(placement: ExpertPlacement, topology: Topology) -> TransferPlan:
    num_devices, node_of = placement.num_devices, topology.node_of_device
    if num_devices != topology.num_devices:
        raise ValueError(
            f"the placement has {num_devices} devices and the topology {topology.num_devices}: wanted the "
            "same devices in both"
        )
    replicated_E = np.flatnonzero(np.count_nonzero(placement.present_ED, axis=1) > 1)
    owners = placement.owner_E[replicated_E].tolist()
    row_P, device_P = np.nonzero(placement.present_ED[replicated_E])
    members_of: list[dict[int, list[int]]] = [{} for _ in owners]  # holders by node
    for row, device in zip(row_P.tolist(), device_P.tolist(), strict=True):
        members, node = members_of[row], node_of[device]
        if node in members:
            members[node].append(device)
        else:
            members[node] = [device]
    duties = [0] * num_devices  # for how many experts a device is the owner or a leader
    for owner in owners:
        duties[owner] += 1
    found: list[tuple[int, bool, int, int, int]] = []  # depth, inside a node, expert, source, destination
    for expert, owner, members in zip(replicated_E.tolist(), owners, members_of, strict=True):
        nodes = sorted(members)
        at = nodes.index(node_of[owner])
        leader, hops = owner, 0
        for node in nodes[at:] + nodes[:at]:
            inside = members[node]
            if node != nodes[at]:
                previous = leader
                leader = min(inside, key=duties.__getitem__) if len(inside) > 1 else inside[0]
                duties[leader] += 1
                found.append((hops, False, expert, previous, leader))
                hops += 1
            if len(inside) > 1:
                first = inside.index(leader)
                inside = inside[first:] + inside[:first]
                for i in range(1, len(inside)):
                    depth = hops + (i + 1).bit_length() - 2
                    found.append((depth, True, expert, inside[(i - 1) // 2], inside[i]))
    return _plan_of(num_devices, found)


def _plan_of(
    num_devices: int,
    found: list[tuple[int, bool, int, int, int]],
    present_before: frozenset[tuple[int, int]] | None = None,
) -> TransferPlan:
    """The plan of edges (depth, inside a node, expert, source, destination), in this order."""
    edges = [TransferEdge(expert, source, to, depth) for depth, _, expert, source, to in sorted(found)]
    return TransferPlan(num_devices, tuple(edges), present_before)


def additional_transfer(
    planned: ExpertPlacement, calibrated: ExpertPlacement, topology: Topology
) -> TransferPlan:
    """What brings the replicas that ``calibrated`` adds to ``planned``; for gathering only.

    Whoever has an expert may send it, not only its owner. So it crosses the slow links once
    for each node without it, along chains that start in the nodes with it: those that send the
    fewest to other nodes so far first (ties: in cyclic order after the owner's). Inside a node
    those that have it send it on, each to at most two, then those that got it from them.
    Among devices that could send, or could let a chain into their node, the ones with the fewest
    messages so far come first (ties: the lowest). Gradients go home along
    :func:`two_level_transfer` of ``calibrated``.

    Args:
        planned: What is there before.
        calibrated: The same owners, and all replicas of ``planned`` and more.
        topology: Nodes of the devices.
    """
    added_of: dict[int, list[int]] = {}
    for expert, device in _added_pairs(planned, calibrated):
        added_of.setdefault(expert, []).append(device)
    if planned.num_devices != topology.num_devices:
        raise ValueError(
            f"the placements have {planned.num_devices} devices and the topology {topology.num_devices}: "
            "wanted the same devices in both"
        )
    growth = TransferGrowth(topology)
    for expert, added in added_of.items():
        growth.add(expert, int(planned.owner_E[expert]), planned.holders(expert), added)
    present_before = frozenset((expert, device) for expert in added_of for device in planned.holders(expert))
    return _plan_of(topology.num_devices, growth.found, present_before)


def _added_pairs(planned: ExpertPlacement, calibrated: ExpertPlacement) -> list[tuple[int, int]]:
    """The (expert, device) pairs that ``calibrated`` has and ``planned`` has not, ascending."""
    if not np.array_equal(planned.owner_E, calibrated.owner_E) or (
        planned.present_ED.shape != calibrated.present_ED.shape
    ):
        raise ValueError("the calibrated placement has other owners than the planned one: wanted the same")
    lost_ED = planned.present_ED & ~calibrated.present_ED
    if lost_ED.any():
        expert, device = (int(i) for i in np.argwhere(lost_ED)[0])
        raise ValueError(
            f"the calibrated placement has expert {expert} no longer on device {device}: wanted all replicas "
            "of the planned one, and more"
        )
    expert_P, device_P = np.nonzero(calibrated.present_ED & ~planned.present_ED)
    return list(zip(expert_P.tolist(), device_P.tolist(), strict=True))
