"""The transfers of SparseAllGather from device to device. SparseReduceScatter is their transpose.

Shape letters: E experts, D devices, P pairs of expert and device.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_fssdp.planning.arrays import frozen_array
from megatron_fssdp.planning.compiled_form import kernel
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology, kept_on


class TransferEdge(NamedTuple):
    """The transfer of one expert from a device that has it to another one, after ``depth`` others."""

    expert: int
    source: int
    destination: int
    depth: int


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """The transfers of one layer between D devices. Those of an expert form a tree with its owner as root.

    A row of ``table``, int64 ``[P, 4]``, has expert, source, destination and depth of an edge. It comes after
    the edge that brings the expert to its source.
    """

    num_devices: int
    table: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", frozen_array(np.reshape(self.table, (-1, 4)), np.int64))

    @cached_property
    def edges(self) -> tuple[TransferEdge, ...]:
        """The edges, made at their first use, because prices need only the table."""
        return tuple(map(TransferEdge._make, self.table.tolist()))

    def check_serves(self, placement: ExpertPlacement) -> None:
        """Raise a ValueError unless the edges bring every expert from its owner to exactly its holders."""
        if self.__dict__.get("_served") is placement or not (len(self.table) or placement.num_replicas):
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
        self.__dict__["_served"] = placement  # Copies of a plan need no second check.

    @cached_property
    def max_depth(self) -> int:
        """Depth of the deepest edge; -1 if the plan has no edges."""
        return int(self.table[:, 3].max(initial=-1))

    def crosses_nodes(self, topology: Topology) -> bool:
        """Whether any edge leads from one node to another."""
        node_D = topology.node_of_device_D
        return bool((node_D[self.table[:, 1]] != node_D[self.table[:, 2]]).any())

    @cached_property
    def most_sent(self) -> int:
        """Replicas that the device which sends the most has to send; of so many it receives gradients."""
        return int(np.bincount(self.table[:, 1], minlength=1).max())

    def edges_of(self, device: int) -> tuple[tuple[TransferEdge, ...], tuple[TransferEdge, ...]]:
        """Edges that bring experts to a device, and edges by which it sends experts, in the plan's order."""
        incoming, outgoing = (self.table[self.table[:, column] == device].tolist() for column in (2, 1))
        return tuple(map(TransferEdge._make, incoming)), tuple(map(TransferEdge._make, outgoing))


@kept_on
def two_level_transfer(placement: ExpertPlacement, topology: Topology) -> TransferPlan:
    """Each expert crosses the slow links once for each node that needs it, then spreads inside the node.

    Example: device 0 owns an expert that all 12 devices of 3 nodes hold. The number on an edge is its depth::

        node 0                     node 1                      node 2

        owner 0 --------0--------> leader 4 --------1--------> leader 8
          |                          |                           |
          +-0-> 1 -1-> 3             +-1-> 5 -2-> 7              +-2-> 9 -3-> 11
          |                          |                           |
          +-0-> 2                    +-1-> 6                     +-2-> 10

    Between nodes, the edges form a chain over one leader for each node, from the owner on in cyclic order, so
    that the NIC of a node carries each expert at most once in and once out. The leader of a node is its first
    holder from a certain place in the node on: the owner's place in its own node for the first expert of an
    owner, the next place for the second one, and so on. This spreads the traffic, and the replica search can
    price each expert alone.

    Inside a node, the edges form a binary tree over the holders in cyclic order, from the leader on. In a
    star, the leader's link would carry the expert more often; in a chain, the depth would grow with the size
    of the node instead of its logarithm. Of equal depth, edges between nodes come first, so that a leader
    sends to the next node before it sends inside its own node. Placement and topology have the same devices.
    """
    num_devices = placement.num_devices
    if num_devices != topology.num_devices:
        raise ValueError(
            f"the placement has {num_devices} devices and the topology {topology.num_devices}: wanted the "
            "same devices in both"
        )
    table = np.empty((placement.num_replicas, 4), np.int64)
    if len(table):
        trees = kernel("transfer_trees").TransferTrees(placement, topology)
        trees.write_edges(memoryview(table))
        table = table[np.lexsort((table[:, 2], table[:, 1], table[:, 0], table[:, 3]))]
        table[:, 3] //= 2
    return TransferPlan(num_devices, table)


def additional_transfer(
    planned: ExpertPlacement, corrected: ExpertPlacement, topology: Topology
) -> TransferPlan:
    """The gathers from owners of the replicas that ``planned`` lacks; a ValueError if owners differ."""
    if not np.array_equal(planned.owner_E, corrected.owner_E) or (
        planned.present_ED.shape != corrected.present_ED.shape
    ):
        raise ValueError("the corrected placement has other owners than the planned one: wanted the same")
    added_ED = corrected.present_ED & ~planned.present_ED
    added_ED[np.arange(planned.num_experts), planned.owner_E] = True
    return two_level_transfer(ExpertPlacement(planned.owner_E, added_ED), topology)
