"""The transfers of SparseAllGather from device to device. SparseReduceScatter is their transpose.

Shape letters: E experts, D devices, P pairs of expert and device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.kernels import transfer_trees
from megatron_fssdp.planning.native.kernel import Kernel
from megatron_fssdp.planning.placement.kept_results import kept_on
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.edge_table import EdgeTable, TransferEdge
from megatron_fssdp.planning.transfer.transfer_growth import TransferGrowth

__all__ = ["TransferEdge", "TransferPlan", "additional_transfer", "plain_transfer", "two_level_transfer"]

first_wrong_edge = Kernel(transfer_trees.first_wrong_edge)
two_level_edges = Kernel(transfer_trees.two_level_edges)


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
    edges: Sequence[TransferEdge]
    present_before: frozenset[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.edges, EdgeTable):
            object.__setattr__(self, "edges", EdgeTable(self.edges))
        table, num_devices = self.table, self.num_devices
        if not len(table):
            return
        present = self.present_before or ()
        num_experts = 1 + max([int(table[:, 0].max(initial=0)), *(expert for expert, _ in present)])
        depth = np.zeros(num_experts * num_devices, np.int64)
        depth[[expert * num_devices + device for expert, device in present]] = 1
        first = first_wrong_edge(table, num_devices, num_experts, self.present_before is None, depth)
        if first >= 0:
            raise ValueError(self._fault(self.edges[first], depth))

    def _fault(self, edge: TransferEdge, depth: np.ndarray) -> str:
        """What is wrong with an edge.

        Args:
            edge: The first wrong edge.
            depth: What the kernel knows before this edge, for each expert and device: 0 if the device does
                not have the expert, otherwise 2 more than the depth of the edge that brings it.
        """
        most = self.num_devices - 1
        if min(edge) < 0 or max(edge.source, edge.destination) > most:
            return (
                f"{edge} leaves the plan: wanted devices from 0 to {most}, and an expert and a depth of 0 or "
                "more"
            )
        at_source = int(depth[edge.expert * self.num_devices + edge.source])
        if not at_source:
            before = "present_before" if self.present_before is not None else "the owner's tree"
            return (
                f"{edge} sends an expert its source does not have yet: wanted a source that is in {before} "
                "or the destination of an earlier edge"
            )
        if depth[edge.expert * self.num_devices + edge.destination]:
            return (
                f"{edge} sends expert {edge.expert} to device {edge.destination}, which already has it: "
                "wanted transfers in which every holder receives an expert once and the owner never does"
            )
        return f"{edge} has depth {edge.depth}: wanted {at_source - 1}"

    @property
    def table(self) -> np.ndarray:
        """Expert, source, destination and depth of each edge, int64 with four columns, read-only."""
        assert isinstance(self.edges, EdgeTable)
        return self.edges.table

    def check_serves(self, placement: ExpertPlacement) -> None:
        """Check that the edges bring every expert from its owner to all its holders, and to no other device.

        Args:
            placement: The placement that the plan must bring about.

        Raises:
            ValueError: An edge starts on a wrong device, or an expert reaches a wrong set of devices.
        """
        if not len(self.edges) and not placement.num_replicas:
            return
        expert_P, source_P, destination_P, depth_P = self.table.T
        got_ED = np.zeros_like(placement.present_ED)
        got_ED[np.arange(placement.num_experts), placement.owner_E] = True
        wrong_P = (depth_P == 0) & (source_P != placement.owner_E[expert_P])
        if wrong_P.any():
            edge = self.edges[int(wrong_P.argmax())]
            raise ValueError(
                f"{edge} starts on device {edge.source}: wanted the owner of expert {edge.expert}, "
                f"device {int(placement.owner_E[edge.expert])}"
            )
        got_ED[expert_P, destination_P] = True
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
        return int(self.table[:, 3].max(initial=-1))

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
        node_D = topology.node_of_device_D
        return expert_bytes * int((node_D[self.table[:, 1]] != node_D[self.table[:, 2]]).sum())


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
    at most once in and once out. The leader of a node is its first holder from a certain place in the node
    on, in cyclic order. That place is the owner's place in its own node for the first expert of an owner, the
    next place for the second one, and so on. This rule spreads the traffic over the devices of a node. The
    leaders of an expert do not depend on other replicas, so the replica search can price each expert alone.

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
    num_experts, num_devices = placement.present_ED.shape
    if num_devices != topology.num_devices:
        raise ValueError(
            f"the placement has {num_devices} devices and the topology {topology.num_devices}: wanted the "
            "same devices in both"
        )
    key_P = np.empty(placement.num_replicas, np.int64)
    expert_P, device_P = np.divmod(np.flatnonzero(placement.present_ED), num_devices)
    holder_P = expert_P * num_devices + topology.place_D[device_P]
    holder_P.sort()
    two_level_edges(holder_P, placement.owner_E, *topology.arrays, key_P)
    key_P.sort()
    table = np.empty((len(key_P), 4), np.int64)
    rest_P, table[:, 2] = np.divmod(key_P, num_devices)
    rest_P, table[:, 1] = np.divmod(rest_P, num_devices)
    rest_P, table[:, 0] = np.divmod(rest_P, num_experts)
    table[:, 3] = rest_P // 2
    table.setflags(write=False)
    return TransferPlan(num_devices, EdgeTable(table))


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
    planned: ExpertPlacement, corrected: ExpertPlacement, topology: Topology
) -> TransferPlan:
    """The transfers that bring the replicas which ``corrected`` has and ``planned`` lacks.

    These transfers only gather parameters. Gradients go to the owners along :func:`two_level_transfer` of
    ``corrected``.

    Every device that has an expert in both placements may send it, not only the owner. Replicas that
    ``corrected`` drops send nothing, because new replicas use their memory. An expert crosses the slow links
    once for each node without it, along chains that start in the nodes that have it. The nodes that have sent
    the fewest messages to other nodes so far come first (ties: cyclic order after the owner's node). Inside a
    node, every device that has the expert sends it to at most two others, which send it on in the same way.
    If several devices can send an expert, or can receive it for their node, those with the fewest messages so
    far come first (ties: the lowest number).

    Args:
        planned: The placement whose replicas are there before.
        corrected: A placement with the same owners.
        topology: Nodes of the devices.

    Raises:
        ValueError: The placements have different owners, or the topology has a different number of devices.
    """
    added_of: dict[int, list[int]] = {}
    for expert, device in _added_pairs(planned, corrected):
        added_of.setdefault(expert, []).append(device)
    if planned.num_devices != topology.num_devices:
        raise ValueError(
            f"the placements have {planned.num_devices} devices and the topology {topology.num_devices}: "
            "wanted the same devices in both"
        )
    kept_ED = planned.present_ED & corrected.present_ED
    holders = {expert: tuple(np.flatnonzero(kept_ED[expert]).tolist()) for expert in added_of}
    growth = TransferGrowth(topology)
    for expert, added in added_of.items():
        growth.add(expert, int(planned.owner_E[expert]), holders[expert], added)
    present_before = frozenset((expert, device) for expert in added_of for device in holders[expert])
    return _plan_of(topology.num_devices, growth.found, present_before)


def _added_pairs(planned: ExpertPlacement, corrected: ExpertPlacement) -> list[tuple[int, int]]:
    """The (expert, device) pairs that are present in ``corrected`` and not in ``planned``, ascending."""
    if not np.array_equal(planned.owner_E, corrected.owner_E) or (
        planned.present_ED.shape != corrected.present_ED.shape
    ):
        raise ValueError("the corrected placement has other owners than the planned one: wanted the same")
    expert_P, device_P = np.nonzero(corrected.present_ED & ~planned.present_ED)
    return list(zip(expert_P.tolist(), device_P.tolist(), strict=True))
