"""Traffic on the busiest links, and the seconds that it takes.

Shape letters: E experts, D devices, P pairs of expert and device.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription, CollectiveName, LinkDescription
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.dispatch.token_dispatch import BusiestLinks
from megatron_fssdp.planning.placement.topology import Topology, kept_on
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan

COUNT_BYTES = 8
"""Bytes of one entry of the router counts that all devices gather."""

FREE = LinkCost(0.0, 0.0)
UNUSED = BusiestLinks()


@dataclass(frozen=True)
class TransferTraffic:
    """Traffic of one SparseAllGather. SparseReduceScatter has the same traffic in the other direction.

    Attributes:
        busiest: Number of experts on the busiest links.
        fill_hops: (hops inside a node, hops between nodes) before the last hop of the path on which these
            take longest. A pipelined transfer takes this much longer than its busiest link.
        num_hops: Hops of the longest path; the number of messages depends on it.
        num_experts: Moved experts, one for each replica; ``num_between_nodes`` of them change nodes.
    """

    busiest: BusiestLinks = UNUSED
    fill_hops: tuple[int, int] = (0, 0)
    num_hops: int = 0
    num_experts: int = 0
    num_between_nodes: int = 0


NO_TRANSFER = TransferTraffic()


@kept_on
def transfer_traffic(plan: TransferPlan, topology: Topology) -> TransferTraffic:
    """Traffic of a transfer plan. The plan keeps it for the next call."""
    if not len(plan.table):
        return NO_TRANSFER
    expert_P, source_P, device_P, depth_P = plan.table.T
    node_D = topology.node_of_device_D
    is_far_P = node_D[source_P] != node_D[device_P]
    # Hops between nodes take longer than those inside, so they count first.
    path_ED = np.zeros((int(expert_P.max()) + 1, plan.num_devices, 2), np.int64)
    longest = (0, 0)
    for depth in range(plan.max_depth + 1):
        at = depth_P == depth
        before = path_ED[expert_P[at], source_P[at]]
        longest = max(longest, max(map(tuple, before.tolist())))
        path_ED[expert_P[at], device_P[at]] = before + np.stack([is_far_P[at], ~is_far_P[at]], axis=1)
    return TransferTraffic(
        moves_traffic(source_P, device_P, topology),
        (longest[1], longest[0]),
        plan.max_depth + 1,
        len(plan.table),
        int(is_far_P.sum()),
    )


def moves_traffic(source_P: np.ndarray, device_P: np.ndarray, topology: Topology) -> BusiestLinks:
    """Units on the busiest links, if one unit travels from each source to its device, integers ``[P]``.

    Units that stay on their device are not counted.
    """
    node_D = topology.node_of_device_D
    is_far_P = node_D[source_P] != node_D[device_P]

    def most(counted_P: np.ndarray, of_node: bool = False) -> int:
        sides = (node_D[side_P] if of_node else side_P for side_P in (source_P, device_P))
        return max(int(np.bincount(side_P[counted_P], minlength=1).max()) for side_P in sides)

    near_P = ~is_far_P & (source_P != device_P)
    far_of_mean_node = int(is_far_P.sum()) / topology.num_nodes
    return BusiestLinks(most(near_P), most(is_far_P), most(is_far_P, of_node=True), far_of_mean_node)


@dataclass(frozen=True, eq=False)
class LinkTimes:
    """Seconds of a transfer on links inside nodes and between nodes, which work at the same time.

    Attributes:
        near_s: Seconds on the link of the busiest device inside its node, ``near_start_s`` of it start-up.
        far_s: Seconds on the NICs of the busiest node, ``far_start_s`` of it start-up.
        in_turn: Whether the links inside nodes work after those between nodes, and not at the same time.
    """

    near_s: float = 0.0
    far_s: float = 0.0
    near_start_s: float = 0.0
    far_start_s: float = 0.0
    in_turn: bool = False

    @property
    def seconds(self) -> float:
        """Seconds until the transfers on both kinds of links have ended."""
        return self.near_s + self.far_s if self.in_turn else max(self.near_s, self.far_s)

    @property
    def is_far(self) -> bool:
        """Whether the NICs take at least as long as the links inside nodes."""
        return self.far_s >= self.near_s


@dataclass(frozen=True)
class LinkSet:
    """Costs of one collective: of a device's link inside its node, and of all NICs of a node together.

    Also of the NICs when one device sends alone (``far_of_device``), and when all nodes send and receive the
    same amount (``far_of_all``); zero if unknown.
    """

    near: LinkCost
    far_of_node: LinkCost
    far_of_device: LinkCost = FREE
    far_of_all: LinkCost = FREE

    def times(
        self, busiest: BusiestLinks, bytes_per_unit: float, starts: int = 1, in_turn: bool = False
    ) -> LinkTimes:
        """Start-up plus transfer seconds of units (rows or experts) (FasterMoE, Eq. 2; Parm, Eq. 12).

        Between nodes, the largest of three bounds counts: the bytes of the busiest node's NICs, the bytes of
        the busiest device, and the bytes of an average node at the bandwidth that remains when all NICs are
        busy. ``starts`` is the number of collectives that share the bytes; each has a start-up.
        """
        near_s = busiest.near * bytes_per_unit * self.near.beta_s_per_byte
        far_s = bytes_per_unit * max(
            busiest.far_of_node * self.far_of_node.beta_s_per_byte,
            busiest.far_of_device * self.far_of_device.beta_s_per_byte,
            busiest.far_of_mean_node * self.far_of_all.beta_s_per_byte,
        )
        near_start_s, far_start_s = starts * self.near.alpha_s, starts * self.far_of_node.alpha_s
        return LinkTimes(
            near_start_s + near_s if busiest.near > 0 else 0.0,
            far_start_s + far_s if busiest.far_of_node > 0 else 0.0,
            near_start_s,
            far_start_s,
            in_turn,
        )


class ClusterLinks(NamedTuple):
    """Links of a cluster, as each kind of transfer uses them.

    ``all_to_all`` is for dispatch and combine, ``transfer`` for spAG, spRS and re-sharding, which send from
    device to device, and ``counts`` for router counts, which every device sends to every device.
    """

    all_to_all: LinkSet
    transfer: LinkSet
    counts: LinkSet


def gather_counts_s(links: LinkSet, topology: Topology, num_experts: int) -> float:
    """Seconds in which every device gets the router counts of all other devices."""
    if topology.num_devices == 1:
        return 0.0
    smallest, largest = topology.smallest_and_largest_node
    others = float(topology.num_devices - smallest)
    busiest = BusiestLinks(float(largest - 1), others, others, others)
    return links.times(busiest, COUNT_BYTES * num_experts).seconds


@lru_cache
def plain_links(cluster: ClusterCost) -> LinkSet:
    """The links of a cluster with the same costs for every kind of transfer."""
    return LinkSet(cluster.intra, cluster.inter)


def link_cost(link: LinkDescription, num_sharing: int = 1) -> LinkCost:
    """Cost of transfers over a link that ``num_sharing`` devices fill together, each with its bandwidth."""
    return LinkCost(link.alpha_s, 1 / (link.bandwidth_bytes_per_s * num_sharing))


def cluster_cost(cluster: ClusterDescription) -> ClusterCost:
    """Costs of a cluster's links and its throughput on experts, as strategies get them."""
    intra, inter = link_cost(cluster.intra_node), link_cost(cluster.inter_node)
    return ClusterCost(intra, inter, cluster.expert_flops_per_s)


def cluster_links(
    cluster: ClusterDescription, *, is_megatrons: bool = False, on_cuda: bool = True
) -> ClusterLinks:
    """The links of a cluster. Measured costs of single collectives replace the general link costs.

    Between CPUs, this package exchanges rows and counts as point-to-point messages, and otherwise by torch's
    collectives, as Megatron does.

    A fitted all-to-all or all-gather gives the bandwidth of each device while all devices of all nodes use
    their NICs. In an uneven all-to-all most NICs are idle, and the busiest node has the whole bandwidth
    ``inter_node`` of the description. A fitted point-to-point transfer limits one device. The limit of a node
    is ``inter_node`` here, too. ``is_megatrons`` says whether Megatron's own dispatcher moves the tokens.
    """
    far = link_cost(cluster.inter_node)
    all_to_all: CollectiveName = "all_to_all"
    if not is_megatrons and "row_exchange" in cluster.collectives:
        all_to_all = "row_exchange"
    counts: CollectiveName = "all_gather" if is_megatrons or on_cuda else all_to_all

    def links_of(name: CollectiveName) -> LinkSet:
        measured = cluster.collectives.get(name, {})
        near = link_cost(measured.get("intra_node", cluster.intra_node))
        if (inter := measured.get("inter_node")) is None:
            return LinkSet(near, far)
        of_node = LinkCost(inter.alpha_s, far.beta_s_per_byte)
        if name == "point_to_point":
            return LinkSet(near, of_node, far_of_device=link_cost(inter))
        return LinkSet(near, of_node, far_of_all=link_cost(inter, cluster.devices_per_node))

    return ClusterLinks(links_of(all_to_all), links_of("point_to_point"), links_of(counts))


def topology_of(cluster: ClusterDescription, num_devices: int) -> Topology:
    """The nodes of an expert-parallel group whose devices fill one node after the other.

    Raises:
        ValueError: The group does not fit the nodes.
    """
    per_node = cluster.devices_per_node
    if num_devices > cluster.num_devices or (num_devices > per_node and num_devices % per_node):
        raise ValueError(
            f"cluster {cluster.name}: {num_devices} devices of an expert-parallel group do not fit on "
            f"{cluster.num_nodes} nodes of {per_node} devices; wanted at most {cluster.num_devices} devices, "
            "and whole nodes if there are several; change expert_model_parallel_size or num_nodes "
            "(--cluster-set num_nodes=…)"
        )
    return Topology(tuple(device // per_node for device in range(num_devices)))
