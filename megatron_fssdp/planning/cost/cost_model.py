"""What a layer costs in seconds: traffic over links, expert compute, exposed transfers.

Shape letters: T tokens, M model dim, F ffn dim, E experts, D devices, N nodes, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.cost.layer_traffic import dispatch_traffic, pairs_traffic, transfer_traffic
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy, TokenDispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan

NUM_ALL_TO_ALLS = 4
"""Dispatch and combine, forward and backward (FasterMoE, Eq. 7)."""

BACKWARD_PER_FORWARD = 2
"""The backward computes gradients of inputs and of weights (FasterMoE, Eq. 7)."""

LEAST_BETA_S_PER_BYTE = 1e-13
"""10 TB/s: a fit to noise must not give a link without a cost."""


@dataclass(frozen=True)
class LinkCost:
    """Seconds of one transfer over a link: ``alpha + beta * bytes`` (Parm, §V, Eq. 12).

    Attributes:
        alpha_s: Seconds to start, whatever the size.
        beta_s_per_byte: Seconds for each byte, the inverse of the bandwidth.
    """

    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        for name, value in (("alpha_s", self.alpha_s), ("beta_s_per_byte", self.beta_s_per_byte)):
            if not np.isfinite(value) or value < 0:
                raise ValueError(
                    f"{name} is {value}: wanted a finite number of 0 or more; fit it to measured times again"
                )

    def time_s[Amount: (float, np.ndarray)](self, num_bytes: Amount) -> Amount:
        """Seconds for ``num_bytes``, or for each of an array; nothing to send costs nothing."""
        return (num_bytes > 0) * (self.alpha_s + self.beta_s_per_byte * num_bytes)


def fit_link_cost(num_bytes: Sequence[float], seconds: Sequence[float]) -> LinkCost:
    """``alpha + beta * bytes`` by least squares of relative errors (Parm §V, Eq. 12).

    Args:
        num_bytes: Sizes of the messages.
        seconds: What each of them took; positive.
    """
    sizes, times = np.asarray(num_bytes, float), np.asarray(seconds, float)
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    (alpha_s, beta_s_per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)
    # Of the two costs that may not be negative, one at its limit leaves the best other one alone.
    if alpha_s < 0:
        alpha_s, beta_s_per_byte = 0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    elif beta_s_per_byte < LEAST_BETA_S_PER_BYTE:
        alpha_s, beta_s_per_byte = columns[:, 0].sum() / (columns[:, 0] ** 2).sum(), LEAST_BETA_S_PER_BYTE
    return LinkCost(float(alpha_s), max(LEAST_BETA_S_PER_BYTE, float(beta_s_per_byte)))


@dataclass(frozen=True)
class LinkFit:
    """A fitted cost and how well it says what was measured.

    Attributes:
        cost: The cost.
        r_squared: Share of the measured seconds' variance that it explains; 1 where they all are the same.
        worst_relative_error: Of all sizes, the largest ``|fitted - measured| / measured``.
    """

    cost: LinkCost
    r_squared: float
    worst_relative_error: float

    @classmethod
    def of(cls, num_bytes: Sequence[float], seconds: Sequence[float]) -> "LinkFit":
        """Fit as :func:`fit_link_cost` does, and look back."""
        cost = fit_link_cost(num_bytes, seconds)
        times = np.asarray(seconds, float)
        errors = np.array([cost.time_s(size) for size in num_bytes]) - times
        variance = ((times - times.mean()) ** 2).sum()
        r_squared = 1 - (errors**2).sum() / variance if variance > 0 else 1.0
        return cls(cost, float(r_squared), float(np.abs(errors / times).max()))


@dataclass(frozen=True)
class ClusterCost:
    """Links and compute of a cluster of equal devices.

    Attributes:
        intra: One direction of one device's link inside its node.
        inter: One direction of one node's NIC.
        expert_flops_per_s: Throughput of one device on expert GEMMs.
    """

    intra: LinkCost
    inter: LinkCost
    expert_flops_per_s: float

    def __post_init__(self) -> None:
        if not self.expert_flops_per_s > 0:
            raise ValueError(
                f"expert_flops_per_s is {self.expert_flops_per_s}: wanted a positive throughput in flops/s"
            )


def dispatch_tokens_DD(dispatch: TokenDispatch, num_devices: int) -> np.ndarray:
    """(token, k) pairs that each device sends to each, int64 [D, D]; the diagonal stays."""
    return np.stack([dispatch.from_source(source).sum(axis=0) for source in range(num_devices)])


def link_time_s[Amount: (float, np.ndarray)](
    near: Amount, far_of_node: Amount, bytes_per_unit: Amount | float, cluster: ClusterCost
) -> Amount:
    """Seconds until the slowest link is done: ``max over links of traffic / bandwidth``.

    FasterMoE, Eq. 2, with both directions of every link and a start-up term (Parm, Eq. 12).

    Args:
        near: Units on the busiest device's link inside its node, or an array of such cases.
        far_of_node: Units on the busiest node's NIC, likewise.
        bytes_per_unit: Bytes of a unit.
        cluster: Link costs.
    """
    near_s = cluster.intra.time_s(near * bytes_per_unit)
    far_s = cluster.inter.time_s(far_of_node * bytes_per_unit)
    return np.maximum(near_s, far_s)


def all_to_all_s(
    tokens_DD: np.ndarray, token_bytes: float, topology: Topology, cluster: ClusterCost
) -> float:
    """Seconds of one all-to-all of the dispatch (FasterMoE, Eq. 2).

    Args:
        tokens_DD: (token, k) pairs by sender and receiver, [D, D].
        token_bytes: Bytes of one token's hidden state.
        topology: Nodes of the devices.
        cluster: Link costs.
    """
    busiest = pairs_traffic(tokens_DD, topology)
    return link_time_s(busiest.near, busiest.far_of_node, token_bytes, cluster)


def expert_forward_s(tokens_D: np.ndarray, flops_per_token: float, cluster: ClusterCost) -> float:
    """Seconds of the experts' forward: ``max_d tokens_d * flops_per_token / P`` (FasterMoE, Eq. 1)."""
    return float(np.max(tokens_D)) * flops_per_token / cluster.expert_flops_per_s


def expert_backward_s(tokens_D: np.ndarray, flops_per_token: float, cluster: ClusterCost) -> float:
    """Seconds of the experts' backward, twice the forward (FasterMoE, Eq. 7; Pro-Prophet, Eq. 3)."""
    return BACKWARD_PER_FORWARD * expert_forward_s(tokens_D, flops_per_token, cluster)


def transfer_s(plan: TransferPlan, expert_bytes: int, topology: Topology, cluster: ClusterCost) -> float:
    """Seconds of one SparseAllGather: bytes over the slowest link, and a start-up for each hop.

    The volume bound of Hecate, Eq. 1, on every link of the plan; hops of one expert follow
    each other, so each adds the start-up of the slower link it may use. SparseReduceScatter
    is the transpose: the same links in the other direction, the same seconds.
    """
    busiest = transfer_traffic(plan, topology).busiest
    return pipelined_s(busiest.near, busiest.far_of_node, float(plan.max_depth), expert_bytes, cluster)


def pipelined_s[Amount: (float, np.ndarray)](
    near: Amount, far_of_node: Amount, max_depth: Amount, expert_bytes: Amount | int, cluster: ClusterCost
) -> Amount:
    """Seconds of a transfer, or of an array of them, from its busiest links and its deepest edge.

    Args:
        near: Experts on the busiest device's link inside its node.
        far_of_node: Experts on the busiest node's NIC.
        max_depth: Depth of the deepest edge; 0 and less add nothing.
        expert_bytes: Bytes of an expert.
        cluster: Link costs.
    """
    between_s = max(0.0, cluster.inter.alpha_s - cluster.intra.alpha_s)
    hop_s = cluster.intra.alpha_s + (far_of_node > 0) * between_s
    return link_time_s(near, far_of_node, expert_bytes, cluster) + (max_depth > 0) * max_depth * hop_s


def overlap_degree(non_moe_s: float, bandwidth_bytes_per_s: float, expert_bytes: int) -> int:
    """Experts whose transfer hides under ``non_moe_s``: ``t = T_nonMoE * bw / size``, floored (Hecate, §4.2).

    Args:
        non_moe_s: Seconds of the compute before the layer, such as attention.
        bandwidth_bytes_per_s: Between nodes where there are several and that is slower, else between devices.
        expert_bytes: Parameters of one expert.
    """
    if expert_bytes <= 0:
        raise ValueError(f"expert_bytes is {expert_bytes}: wanted the bytes of one expert's parameters")
    if not (np.isfinite(non_moe_s * bandwidth_bytes_per_s) and non_moe_s >= 0 and bandwidth_bytes_per_s >= 0):
        raise ValueError(
            f"non_moe_s is {non_moe_s} and bandwidth_bytes_per_s is {bandwidth_bytes_per_s}: wanted finite "
            "numbers of 0 or more; measure them again"
        )
    return int(non_moe_s * bandwidth_bytes_per_s / expert_bytes)


def exposed_s[Amount: (float, np.ndarray)](busy_s: Amount, hidden_under_s: float) -> Amount:
    """Seconds of a transfer that the compute beside it does not hide (Pro-Prophet, Eq. 8)."""
    return np.maximum(0.0, busy_s - hidden_under_s)


def layer_s[Amount: (float, np.ndarray)](
    *, all_to_all_s: Amount, expert_forward_s: Amount, exposed_gather_s: Amount, exposed_reduce_s: Amount
) -> Amount:
    """Seconds of one MoE layer, forward and backward.

    Four all-to-alls, three times the forward compute, and what of spAG and spRS is not
    hidden (FasterMoE, Eq. 7; Pro-Prophet, Eq. 8).
    """
    compute_s = (1 + BACKWARD_PER_FORWARD) * expert_forward_s
    return NUM_ALL_TO_ALLS * all_to_all_s + compute_s + exposed_gather_s + exposed_reduce_s


def dispatched_layer_s(
    counts_DE: np.ndarray,
    placement: ExpertPlacement,
    topology: Topology,
    *,
    cluster: ClusterCost,
    token_bytes: float,
    flops_per_token: float,
    dispatch_policy: DispatchPolicy = "even",
) -> float:
    """Seconds of a layer's all-to-alls and experts when these counts are dispatched under a placement.

    Args:
        counts_DE: (token, k) pairs by source and expert, int64 ``[D, E]``.
        placement: Where the experts are.
        topology: Nodes of the devices.
        cluster: Link and compute costs.
        token_bytes: One token's hidden state.
        flops_per_token: Forward of one expert for one token.
        dispatch_policy: How the tokens are split among holders.
    """
    traffic = dispatch_traffic(dispatch_policy, counts_DE, placement, topology)
    return layer_s(
        all_to_all_s=link_time_s(traffic.busiest.near, traffic.busiest.far_of_node, token_bytes, cluster),
        expert_forward_s=expert_forward_s(traffic.tokens_D, flops_per_token, cluster),
        exposed_gather_s=0.0,
        exposed_reduce_s=0.0,
    )
