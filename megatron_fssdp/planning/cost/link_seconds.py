"""Traffic on the busiest links, the seconds that it takes, and those of exchanges in steps.

Shape letters: E experts, D devices, P pairs of expert and device.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription, CollectiveName, LinkDescription
from megatron_fssdp.planning.arrays import views
from megatron_fssdp.planning.compiled_form import kernel
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD, FREE, ClusterCost, LinkCost
from megatron_fssdp.planning.dispatch.token_dispatch import BusiestLinks
from megatron_fssdp.planning.placement.topology import GroupRing, Topology, kept_on
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan

COUNT_BYTES = 8
"""Bytes of one entry of the router counts that all devices gather."""

UNUSED = BusiestLinks()


@dataclass(frozen=True)
class TransferTraffic:
    """Traffic of one SparseAllGather. SparseReduceScatter has the same traffic in the other direction.

    Attributes:
        busiest: Number of experts on the busiest links.
        fill_hops: Hops (inside a node, between nodes) before the last one of the path on which these take
            longest: as much longer than its busiest link a pipelined transfer takes.
        num_hops: Hops of the longest path.
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
    """Traffic of a transfer plan."""
    if not len(plan.table):
        return NO_TRANSFER
    busiest, num_far, far_hops, hops = _counted(plan.table, topology)
    return TransferTraffic(busiest, (hops - far_hops, far_hops), plan.max_depth + 1, len(plan.table), num_far)


def moves_traffic(source_P: np.ndarray, device_P: np.ndarray, topology: Topology) -> BusiestLinks:
    """Units on the busiest links, if one travels from each source to its device, int64 ``[P]``."""
    none_P = np.zeros_like(source_P)
    return _counted(np.stack([none_P, source_P, device_P, none_P], axis=1), topology)[0]


def _counted(table: np.ndarray, topology: Topology) -> tuple[BusiestLinks, int, int, int]:
    """What the kernel ``count_edges`` finds in a table of edges."""
    (node_D, _, first_N), results = topology.arrays, np.zeros(6, np.int64)
    hops_ED = np.zeros((int(table[:, 0].max(initial=0)) + 1, len(node_D)), np.int64)
    sides = (np.zeros((4, num), np.int64) for num in (len(node_D), len(first_N) - 1))
    kernel("transfer_trees").count_edges(*views(table, node_D, hops_ED, *sides, results))
    near, of_device, of_node, num_far, far_hops, hops = results.tolist()
    busiest = BusiestLinks(near, of_device, of_node, num_far / topology.num_nodes)
    return busiest, num_far, far_hops, hops


@dataclass(frozen=True, eq=False)
class LinkTimes:
    """Seconds of a transfer on the busiest links inside nodes (``near_s``) and between them, with start-up.

    If ``in_turn``, the links inside nodes work after those between nodes.
    """

    near_s: float = 0.0
    far_s: float = 0.0
    near_start_s: float = 0.0
    far_start_s: float = 0.0
    in_turn: bool = False

    @property
    def seconds(self) -> float:
        """Seconds until both kinds of links are done."""
        return self.near_s + self.far_s if self.in_turn else max(self.near_s, self.far_s)

    @property
    def is_far(self) -> bool:
        """Whether the NICs take at least as long as the links inside nodes."""
        return self.far_s >= self.near_s


class LinkSet(NamedTuple):
    """Costs of one collective: of a device's link inside its node, and of all NICs of a node together.

    Also of the NICs when one device sends alone (``far_of_device``), and when all nodes send and receive the
    same amount (``far_of_all``), so that the slowest message counts; zero if unknown.
    """

    near: LinkCost
    far_of_node: LinkCost
    far_of_device: LinkCost = FREE
    far_of_all: LinkCost = FREE

    def times(
        self, busiest: BusiestLinks, bytes_per_unit: float, starts: int = 1, in_turn: bool = False
    ) -> LinkTimes:
        """Start-up plus transfer seconds of units (rows or experts) (FasterMoE, Eq. 2; Parm, Eq. 12).

        Between nodes, the busier counts of the busiest node's NICs and the busiest device. The more the other
        NICs are busy as well, the more it waits for the slowest message: by the part that the mean node has
        of the busiest one's seconds, what an exchange among all takes longer than its bytes replaces the
        start-up. ``starts`` collectives share the bytes.
        """
        near_s = busiest.near * bytes_per_unit * self.near.beta_s_per_byte
        far_s = bytes_per_unit * max(
            busiest.far_of_node * self.far_of_node.beta_s_per_byte,
            busiest.far_of_device * self.far_of_device.beta_s_per_byte,
        )
        near_start_s, far_start_s = starts * self.near.alpha_s, starts * self.far_of_node.alpha_s
        longer_s = far_start_s
        if far_s > 0 and self.far_of_all != FREE:
            mean_bytes = busiest.far_of_mean_node * bytes_per_unit
            mean_s = mean_bytes * self.far_of_node.beta_s_per_byte
            all_s = starts * self.far_of_all.alpha_s + mean_bytes * self.far_of_all.beta_s_per_byte
            longer_s += (max(all_s - mean_s, 0.0) - far_start_s) * mean_s / far_s
        return LinkTimes(
            near_start_s + near_s if busiest.near > 0 else 0.0,
            longer_s + far_s if busiest.far_of_node > 0 else 0.0,
            near_start_s,
            far_start_s,
            in_turn,
        )


class ClusterLinks(NamedTuple):
    """Links as used by dispatch and combine, by transfers, and by router counts."""

    all_to_all: LinkSet
    transfer: LinkSet
    counts: LinkSet


@lru_cache(maxsize=64)
def gather_counts_s(links: LinkSet, topology: Topology, num_experts: int) -> float:
    """Seconds in which every device gets the router counts of all other devices."""
    if topology.num_devices == 1:
        return 0.0
    smallest, largest = topology.smallest_and_largest_node
    others = float(topology.num_devices - smallest)
    # A ring through each device's NIC carries a part of the counts.
    busiest = BusiestLinks(float(largest - 1), others / smallest, others, others)
    return links.times(busiest, COUNT_BYTES * num_experts).seconds


def link_cost(link: LinkDescription, num_sharing: int = 1) -> LinkCost:
    """Cost of transfers over a link that ``num_sharing`` devices fill together, each with its bandwidth."""
    return LinkCost(link.alpha_s, 1 / (link.bandwidth_bytes_per_s * num_sharing))


def cluster_cost(cluster: ClusterDescription) -> ClusterCost:
    """Costs of a cluster's links and its throughput on experts, as strategies get them."""
    intra, inter = link_cost(cluster.intra_node), link_cost(cluster.inter_node)
    return ClusterCost(intra, inter, cluster.expert_flops_per_s, link_cost(cluster.inter_device))


def cluster_links(cluster: ClusterDescription) -> ClusterLinks:
    """The links of a cluster. Measured costs of single collectives replace the general link costs.

    Tokens and counts travel by the collectives of Megatron's dispatcher under all strategies. Transfers are
    point-to-point messages.

    A fitted collective gives the cost while all devices use their NICs and begin at different moments. In an
    uneven all-to-all most NICs are idle, and the busiest one works from the first message on, at the cost of
    ``inter_node``.
    """
    far, of_device = link_cost(cluster.inter_node), link_cost(cluster.inter_device)

    def links_of(name: CollectiveName) -> LinkSet:
        measured = cluster.collectives.get(name, {})
        near = link_cost(measured.get("intra_node", cluster.intra_node))
        if (inter := measured.get("inter_node")) is None:
            return LinkSet(near, far, of_device)
        return LinkSet(near, far, of_device, link_cost(inter, cluster.devices_per_node))

    return ClusterLinks(links_of("all_to_all"), links_of("point_to_point"), links_of("all_gather"))


def topology_of(cluster: ClusterDescription, num_devices: int) -> Topology:
    """The nodes of a group that fills one node after the other; a ValueError if it does not fit them."""
    per_node = cluster.devices_per_node
    if num_devices > cluster.num_devices or (num_devices > per_node and num_devices % per_node):
        raise ValueError(
            f"cluster {cluster.name}: {num_devices} devices of an expert-parallel group do not fit on "
            f"{cluster.num_nodes} nodes of {per_node} devices; wanted at most {cluster.num_devices} devices, "
            "and whole nodes if there are several; change expert_model_parallel_size or num_nodes "
            "(--cluster-set num_nodes=…)"
        )
    return Topology(tuple(device // per_node for device in range(num_devices)))


@dataclass(frozen=True)
class SteppedExchange:
    """A layer's exchanges and experts in the steps of FasterMoE's smart schedule (§4.2, Fig. 8).

    Messages run in the order ``S_0 … S_{n−1}, R_0 … R_{n−1}`` (``dispatchers/smart_schedule.py``), and
    compute in the order ``C_0 … C_{n−1}``. Step 0 uses the links inside a group; the others share those
    between groups in equal parts, between nodes if ``between_nodes``. Compute is divided evenly. Each of the
    ``num_steps``, at least 2, pays the start-up of the whole exchange, and ``host_s`` on each lane. The price
    does not know that smaller GEMMs are slower, and that weight gradients are written in every step.
    """

    num_steps: int
    between_nodes: bool
    host_s: float = 0.0

    @classmethod
    def of(cls, ring: GroupRing, topology: Topology, host_s: float = 0.0) -> "SteppedExchange | None":
        """The steps of a ring of groups; ``None`` if all devices form one group."""
        return cls(ring.num_steps, topology.num_nodes > 1, host_s) if ring.num_steps > 1 else None

    def seconds(self, first: LinkTimes, second: LinkTimes, experts_s: float) -> float:
        """Seconds from the first sent row to the last result; the arguments are of all groups at once."""
        sent_s, ends = 0.0, [0.0]
        for step in range(self.num_steps):
            sent_s = sent_s + self.step_s(first, step) + self.host_s
            ends.append(max(ends[-1], sent_s) + (experts_s / self.num_steps + self.host_s))
        returned_s = sent_s
        for step, computed_s in enumerate(ends[1:]):
            returned_s = max(returned_s, computed_s) + self.step_s(second, step) + self.host_s
        return returned_s

    def saves(self, dispatch: LinkTimes, combine: LinkTimes, experts_s: float) -> bool:
        """Whether both passes together are faster in steps, with ``experts_s`` of the forward pass."""
        backward_s = BACKWARD_PER_FORWARD * experts_s
        at_once_s = 2 * (dispatch.seconds + combine.seconds) + experts_s + backward_s
        forward_s = self.seconds(dispatch, combine, experts_s)
        return forward_s + self.seconds(combine, dispatch, backward_s) < at_once_s

    def step_s(self, exchange: LinkTimes, step: int) -> float:
        """Seconds of one step's messages in one direction; step 0 is the exchange within the own group."""
        if not step:
            return exchange.near_s if self.between_nodes else 0.0
        whole_s, start_s = exchange.near_s, exchange.near_start_s
        if self.between_nodes:
            whole_s, start_s = exchange.far_s, exchange.far_start_s
        if not whole_s:  # links without bytes have no start-up either
            return 0.0
        return start_s + max(whole_s - start_s, 0.0) / (self.num_steps - 1)
