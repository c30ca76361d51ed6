"""The transfers of SparseAllGather from device to device. SparseReduceScatter is their transpose.

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
    """The transfer of one expert's parameters from one device to another.

    Attributes:
        expert: Number of the expert.
        source: Device that sends. It has the expert before.
        destination: Device that receives.
        depth: Number of transfers that must come before this one, counted from the device that had the expert
            at the start (the owner, in most plans).
    """

    expert: int
    source: int
    destination: int
    depth: int


@dataclass(frozen=True)
class TransferPlan:
    """The transfers of one layer, parents before children.

    The constructor checks that the edges of every expert form one tree. The root (the owner) is never a
    destination. Every other device receives the expert once. No device sends the expert before it has it.
    Depths count hops from the root. With ``present_before``, the edges form one tree for each device that
    sends an expert that it had before.

    Attributes:
        num_devices: Number of devices, D.
        edges: The transfers. An edge comes after the edge that brings the expert to its source.
        present_before: The (expert, device) pairs from which trees may start, for a plan that only adds
            replicas to those that are there. None means that each expert has one tree, which starts at its
            owner.

    Raises:
        ValueError: The edges do not form such trees.
    """

    num_devices: int
    edges: tuple[TransferEdge, ...]
    present_before: frozenset[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        num_devices, is_rooted = self.num_devices, self.present_before is None
        depth_of: dict[int, int] = {}  # expert * D + device -> depth; -1 at the root
        rooted: dict[int, int] = {}  # expert -> root of its tree
        for expert, device in self.present_before or ():
            depth_of[expert * num_devices + device] = -1
        for edge in self.edges:
            expert, source, destination, depth = edge
            if not (0 <= source < num_devices and 0 <= destination < num_devices and expert >= 0):
                raise ValueError(
                    f"{edge} leaves the plan: wanted devices from 0 to {num_devices - 1} and an expert of 0 "
                    "or more"
                )
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
                    "transfers in which every holder receives an expert once and the owner never does"
                )
            if depth != depth_of[key] + 1:
                raise ValueError(f"{edge} has depth {depth}: wanted {depth_of[key] + 1}")
            depth_of[target] = depth

    def check_serves(self, placement: ExpertPlacement) -> None:
        """Check that the edges bring every expert from its owner to all its holders, and to no other device.

        Args:
            placement: The placement that the plan must bring about.

        Raises:
            ValueError: An edge starts on a wrong device, or an expert reaches a wrong set of devices.
        """
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
        """Number of edges, one for each replica."""
        return len(self.edges)

    @cached_property
    def max_depth(self) -> int:
        """Depth of the deepest edge; -1 if the plan has no edges."""
        return max((edge.depth for edge in self.edges), default=-1)

    @cached_property
    def _edges_by_device(self) -> dict[int, tuple[list[TransferEdge], list[TransferEdge]]]:
        """For each device, the edges that end there and the edges that start there."""
        by_device: dict[int, tuple[list[TransferEdge], list[TransferEdge]]] = {}
        for edge in self.edges:
            by_device.setdefault(edge.destination, ([], []))[0].append(edge)
            by_device.setdefault(edge.source, ([], []))[1].append(edge)
        return by_device

    def edges_of(self, device: int) -> tuple[tuple[TransferEdge, ...], tuple[TransferEdge, ...]]:
        """Edges that bring experts to a device, and edges by which it sends experts, in the plan's order."""
        incoming, outgoing = self._edges_by_device.get(device, ((), ()))
        return tuple(incoming), tuple(outgoing)

    @cached_property
    def _parent_of(self) -> dict[tuple[int, int], int]:
        """The device that sends each expert to each device: (expert, destination) -> source."""
        return {(edge.expert, edge.destination): edge.source for edge in self.edges}

    @cached_property
    def _children_of(self) -> dict[tuple[int, int], list[int]]:
        """The devices to which each device sends each expert: (expert, source) -> destinations."""
        children: dict[tuple[int, int], list[int]] = {}
        for edge in self.edges:
            children.setdefault((edge.expert, edge.source), []).append(edge.destination)
        return children

    def parent(self, expert: int, device: int) -> int | None:
        """The device that sends an expert to a given device; None if no device does."""
        return self._parent_of.get((expert, device))

    def children(self, expert: int, device: int) -> tuple[int, ...]:
        """The devices to which a given device sends an expert, in the order of the plan."""
        return tuple(self._children_of.get((expert, device), ()))

    def total_bytes(self, expert_bytes: int) -> int:
        """Bytes that all transfers move together.

        Args:
            expert_bytes: Bytes of the parameters of one expert.
        """
        return self.num_transfers * expert_bytes

    def inter_node_bytes(self, expert_bytes: int, topology: Topology) -> int:
        """Bytes that travel from one node to another.

        Args:
            expert_bytes: Bytes of the parameters of one expert.
            topology: Nodes of the devices.
        """
        node_of = topology.node_of_device
        return expert_bytes * sum(node_of[edge.source] != node_of[edge.destination] for edge in self.edges)


def plain_transfer(placement: ExpertPlacement) -> TransferPlan:
    """Every owner sends its experts directly to all their holders (Hecate, §5.1).

    Each expert takes one hop, and the owner's link carries all copies.

    Args:
        placement: The placement to bring about.
    """
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
    """Each expert crosses the slow links once for each node that needs it, then spreads inside the node.

    Example: device 0 owns an expert that all 12 devices of 3 nodes hold. The number on an edge is its depth::

        node 0                     node 1                      node 2

        owner 0 --------0--------> leader 4 --------1--------> leader 8
          |                          |                           |
          +-0-> 1 -1-> 3             +-1-> 5 -2-> 7              +-2-> 9 -3-> 11
          |                          |                           |
          +-0-> 2                    +-1-> 6                     +-2-> 10

    Between nodes, the edges form a chain over one leader for each node. The chain starts at the owner and
    visits the other nodes in cyclic order of their numbers. In a chain, the NIC of a node carries each expert
    at most once in and once out. The leader of a node is the holder that is the owner or a leader of the
    fewest experts so far. Ties go to the lowest device. This rule spreads the traffic over the devices of a
    node. Experts take their turn in ascending order, and all owners are counted before the first one.

    Inside a node, the edges form a binary tree over the holders in cyclic order of their numbers, from the
    leader on. Every holder sends the expert to at most two others. In a star, the leader's link would carry
    the expert more often, which is slow when many experts share a leader. In a chain, the depth would grow
    with the size of the node instead of its logarithm. Among edges of equal depth, those between nodes come
    first, so that a leader sends to the next node before it sends inside its own node.

    Args:
        placement: The placement to bring about.
        topology: Nodes of the devices.

    Raises:
        ValueError: The placement and the topology have different numbers of devices.
    """
    return kept_on(placement, topology, _two_level_transfer)


def _two_level_transfer(placement: ExpertPlacement, topology: Topology) -> TransferPlan:
    """Compute :func:`two_level_transfer`, which keeps the result on the placement."""
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
    duties = [0] * num_devices  # Number of experts of which each device is the owner or a leader.
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
    """The plan that consists of the given edges, sorted.

    Args:
        num_devices: Number of devices, D.
        found: The edges: (depth, whether inside a node, expert, source, destination).
        present_before: The (expert, device) pairs from which trees may start, as in :class:`TransferPlan`.
    """
    edges = [TransferEdge(expert, source, to, depth) for depth, _, expert, source, to in sorted(found)]
    return TransferPlan(num_devices, tuple(edges), present_before)


def additional_transfer(
    planned: ExpertPlacement, calibrated: ExpertPlacement, topology: Topology
) -> TransferPlan:
    """The transfers that bring the replicas which ``calibrated`` adds to ``planned``.

    These transfers only gather parameters. Gradients go to the owners along :func:`two_level_transfer` of
    ``calibrated``.

    Every device that has an expert may send it, not only the owner. An expert crosses the slow links once for
    each node without it, along chains that start in the nodes that have it. The nodes that have sent the
    fewest messages to other nodes so far come first (ties: cyclic order after the owner's node). Inside a
    node, every device that has the expert sends it to at most two others, which send it on in the same way.
    If several devices can send an expert, or can receive it for their node, those with the fewest messages so
    far come first (ties: the lowest number).

    Args:
        planned: The placement whose replicas are there before.
        calibrated: A placement with the same owners and all replicas of ``planned``, and more.
        topology: Nodes of the devices.

    Raises:
        ValueError: The placements have different owners, ``calibrated`` lacks a replica of ``planned``, or
            the topology has a different number of devices.
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
    """The (expert, device) pairs that are present in ``calibrated`` and not in ``planned``, ascending."""
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
