"""Calibration: add replicas to a layer's placement when the gate's exact counts are known (Hecate, §4.2).

Shape letters: E experts, D devices.
"""

from collections.abc import Callable

import numpy as np

from megatron_fssdp.planning.arrays import checked_counts
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import (
    LayerPrice,
    LayerWork,
    counts_seconds,
    expert_seconds,
    layer_seconds,
)
from megatron_fssdp.planning.cost.link_seconds import (
    NO_TRANSFER,
    TransferTraffic,
    transfer_traffic,
)
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy, plan_dispatch
from megatron_fssdp.planning.papers.sparse_materialization import sparse_materialization
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer.transfer_plan import additional_transfer, two_level_transfer

MaterializationPlanner = Callable[..., ExpertPlacement]
"""A planner of one layer: ``(owner_E, load_DE, topology, *, overlap_degree, slots)`` to a placement.

Its arguments are those of :func:`sparse_materialization`, but for the loads, which are by source device too.
"""


def sparse_materialization_by_source(
    owner_E: np.ndarray, load_DE: np.ndarray, topology: Topology, *, overlap_degree: int, slots: int
) -> ExpertPlacement:
    """Hecate's Alg. 1 as a :data:`MaterializationPlanner`; it sums ``load_DE`` over the sources."""
    load_E = np.asarray(load_DE).sum(axis=0)
    return sparse_materialization(owner_E, load_E, topology, overlap_degree=overlap_degree, slots=slots)


def calibrated_placement(
    planned: ExpertPlacement,
    counts_DE: np.ndarray,
    topology: Topology,
    *,
    overlap_degree: int,
    slots: int,
    planner: MaterializationPlanner,
    profile: LayerProfile,
    life: ReplicaLife = ReplicaLife.ITERATION,
    num_micro_batches: int = 1,
    dispatch_policy: DispatchPolicy = "even",
    hides: bool = True,
) -> ExpertPlacement | None:
    """Add replicas for the exact counts, if they save more time than their transfer takes (Hecate, §4.2).

    The planner runs again with the exact counts and the same limits. The replicas of its result that
    ``planned`` lacks go into the free slots, those of the most loaded experts first. The planner may use all
    slots, not only the free ones. Otherwise it would use free slots for replicas that are there already.

    The paper leaves some points open. We solve them as follows:

    * The planner runs again with the same overlap degree. So at most ``overlap_degree`` experts get more
      replicas, and the layer may then have up to twice as many replicated experts.
    * Replicas that are there stay, even if the counts do not need them: their transfer is already paid.
    * The additions of the most loaded 1, 2, 4, ... experts and of all experts are compared, because the
      additions of one expert may pay off when those of all do not.

    The gain of a candidate is the difference of two prices of :func:`layer_seconds` with the exact dispatch,
    as if all micro-batches had these counts. The candidate pays for the gather of its additions, which
    nothing hides, and for the part of the longer reduction that compute does not hide. With
    re-materialization it also pays for the longer gathers of all later passes. The host's time for this
    search is not counted.

    Args:
        planned: The placement whose replicas are on their devices or are being gathered.
        counts_DE: (token, k) pairs that every device routes to every expert, int64 ``[D, E]``.
        topology: Nodes of the devices.
        overlap_degree: Most experts that may get more replicas, t.
        slots: Most replicas that a device may hold, with those of ``planned``, m.
        planner: Planner that runs again, :func:`sparse_materialization_by_source` for Alg. 1.
        profile: Measured costs of the layer and the links, the same numbers on all ranks.
        life: How long replicas stay on their devices.
        num_micro_batches: Number of micro-batches that run under the placement before it is planned again.
        dispatch_policy: How the tokens of an expert are split among its holders.
        hides: Whether transfers run beside compute.

    Returns:
        The candidate with the highest gain, which has all replicas of ``planned`` and more; None if no
        candidate has a gain.

    Raises:
        ValueError: The counts do not match the placement, there are no micro-batches, or ``planned`` holds
            more than ``slots`` replicas on a device.
    """
    counts = checked_counts(counts_DE, planned.num_devices, planned.num_experts)
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches is {num_micro_batches}: wanted 1 or more")
    if int(planned.replicas_per_device_D.max()) > slots:
        raise ValueError(
            f"the planned placement has {int(planned.replicas_per_device_D.max())} replicas on one device: "
            f"wanted at most slots = {slots}, the limit with which it was planned"
        )
    counts_s = counts_seconds(profile, topology, planned.num_experts)
    gather = transfer_traffic(two_level_transfer(planned, topology), topology)

    def price_of(placement: ExpertPlacement, addition: TransferTraffic) -> LayerPrice:
        """Price of the layer under a placement."""
        dispatch = plan_dispatch(dispatch_policy, num_micro_batches * counts, placement, topology)
        replicas = transfer_traffic(two_level_transfer(placement, topology), topology)
        return layer_seconds(
            LayerWork(float(dispatch.device_tokens_D.max()), dispatch.busiest, gather, replicas, addition),
            profile,
            life,
            counts_s=counts_s,
            num_micro_batches=num_micro_batches,
            hides=hides,
        )

    price = price_of(planned, NO_TRANSFER)
    cluster = profile.cluster
    mean_tokens = num_micro_batches * float(counts.sum()) / planned.num_devices
    forward_s = expert_seconds(
        mean_tokens, profile.flops_per_token, cluster.expert_flops_per_s, num_micro_batches
    )
    # No candidate is faster than a balanced layer without any traffic. If even that would save less than the
    # transfer of one expert costs, the planner does not have to run.
    savable_s = float(price.moe_s) - num_micro_batches * (counts_s + (1 + BACKWARD_PER_FORWARD) * forward_s)
    if life is ReplicaLife.ITERATION:
        savable_s -= float(price.gather_s)  # The replicas of ``planned`` are gathered in any case.
    if savable_s <= min(link.time_s(profile.expert_bytes) for link in (cluster.intra, cluster.inter)):
        return None
    wanted = planner(planned.owner_E, counts, topology, overlap_degree=overlap_degree, slots=slots)
    additions = _additions(planned, wanted, counts.sum(axis=0), slots)
    best, best_gain_s = None, 0.0
    for num_experts in doubling(len(additions)):
        pairs = [pair for of_expert in additions[:num_experts] for pair in of_expert]
        candidate = planned.with_replicas(pairs, slots=slots)
        added = transfer_traffic(additional_transfer(planned, candidate, topology), topology)
        gain_s = float(price.moe_s - price_of(candidate, added).moe_s)
        if gain_s > best_gain_s:
            best, best_gain_s = candidate, gain_s
    return best


def _additions(
    planned: ExpertPlacement, wanted: ExpertPlacement, load_E: np.ndarray, slots: int
) -> list[list[tuple[int, int]]]:
    """The wanted (expert, device) pairs with free slots, by expert in descending load."""
    missing_ED = wanted.present_ED & ~planned.present_ED
    left_D = slots - planned.replicas_per_device_D
    additions = []
    for expert in np.argsort(-load_E, kind="stable").tolist():
        devices = np.flatnonzero(missing_ED[expert] & (left_D > 0))
        left_D[devices] -= 1
        if devices.size:
            additions.append([(expert, device) for device in devices.tolist()])
    return additions


def doubling(most: int) -> list[int]:
    """The numbers 1, 2, 4, ... that are below ``most``, then ``most``. The list is empty for 0."""
    return [*(1 << i for i in range(max(most - 1, 0).bit_length())), most] if most else []
