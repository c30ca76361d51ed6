"""Correcting a layer's placement once the gate has decided (Hecate, §4.2, calibration).

Shape letters: E experts, D devices.
"""

from typing import Protocol

import numpy as np

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import (
    LayerPrice,
    LayerWork,
    counts_seconds,
    expert_seconds,
    layer_seconds,
    transfer_seconds,
)
from megatron_fssdp.planning.cost.layer_traffic import (
    NO_TRANSFER,
    TransferTraffic,
    dispatch_traffic,
    transfer_traffic,
)
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy
from megatron_fssdp.planning.loads.checked_loads import checked_counts
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.papers.sparse_materialization import sparse_materialization
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import additional_transfer, two_level_transfer


class MaterializationPlanner(Protocol):
    """Plans one layer from loads by source and expert, as ``plan_materialization`` does."""

    def __call__(
        self, owner_E: np.ndarray, load_DE: np.ndarray, topology: Topology, *, overlap_degree: int, slots: int
    ) -> ExpertPlacement:
        """A placement with at most ``slots`` replicas a device and ``overlap_degree`` replicated experts."""
        ...


def sparse_materialization_by_source(
    owner_E: np.ndarray, load_DE: np.ndarray, topology: Topology, *, overlap_degree: int, slots: int
) -> ExpertPlacement:
    """Hecate's Alg. 1 from loads by source and expert, ``[D, E]``; it asks only for their sums."""
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
    """More replicas for the exact counts, if they save more time than they take to bring.

    Hecate, §4.2. The planner runs again, on the exact counts and within the same limits; of
    its result, what ``planned`` does not have yet goes into the slots that are left, most loaded
    experts first. It is told of all slots, not only of those left: replicas that are
    there already would otherwise be planned once more in place of others.

    What the paper leaves open. The overlap degree stays what it was for the rerun, so at most
    ``overlap_degree`` experts gain replicas; the layer may then have up to twice as many
    replicated ones. Replicas that are there stay, although the counts may not want them:
    they have been paid for. And it need not be all or nothing: the additions of the most loaded
    1, 2, 4, ... experts and of all are compared, because one expert's may pay where all do not.

    A candidate's gain is the difference of two prices of :func:`layer_seconds` with the exact dispatch,
    taking the other micro-batches to be like this one. The candidate pays for the gather of its
    additions, which nothing hides, and for the longer reduction as far as compute does not hide it.
    With re-materialization it also pays for the longer gathers of all later passes. The host's own time
    to find it is not counted.

    Args:
        planned: The placement whose replicas are there or under way.
        counts_DE: (token, k) pairs that every device routes to every expert, int64 ``[D, E]``.
        topology: Nodes of the devices.
        overlap_degree: Most experts that gain replicas, t.
        slots: Most replicas a device may hold altogether, m.
        planner: Plans the layer anew; :func:`sparse_materialization_by_source` for Alg. 1.
        profile: Measured costs, the same numbers on all ranks.
        life: For how long replicas are on their devices.
        num_micro_batches: How many micro-batches run under the placement before it is planned again.
        dispatch_policy: How the tokens are split among holders.
        hides: Whether transfers run beside compute.

    Returns:
        A superset of ``planned`` with the highest gain; None if none gains.
    """
    counts = checked_counts(counts_DE, planned.num_devices, planned.num_experts)
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches is {num_micro_batches}: wanted 1 or more")
    if int(planned.replicas_per_device_D.max()) > slots:
        raise ValueError(
            f"the planned placement has {int(planned.replicas_per_device_D.max())} replicas on one device: "
            f"wanted at most slots = {slots}, the bound it was planned with"
        )
    counts_s = counts_seconds(profile, topology, planned.num_experts)
    gather = transfer_traffic(two_level_transfer(planned, topology), topology)

    def price_of(
        placement: ExpertPlacement, replicas: TransferTraffic, addition: TransferTraffic
    ) -> LayerPrice:
        traffic = dispatch_traffic(dispatch_policy, counts, placement, topology).times(num_micro_batches)
        return layer_seconds(
            LayerWork(float(traffic.tokens_D.max()), traffic.busiest, gather, replicas, addition),
            profile,
            life,
            counts_s=counts_s,
            num_micro_batches=num_micro_batches,
            hides=hides,
        )

    price = price_of(planned, gather, NO_TRANSFER)
    cluster = profile.cluster
    mean_tokens = num_micro_batches * float(counts.sum()) / planned.num_devices
    ideal_s = (
        (1 + BACKWARD_PER_FORWARD)
        * num_micro_batches
        * expert_seconds(mean_tokens, profile.flops_per_token, cluster.expert_flops_per_s, num_micro_batches)
    )
    # No placement saves more than what separates this one from a balanced layer without traffic:
    # where that does not pay for one expert's way, the planner need not run.
    savable_s = float(price.moe_s) - num_micro_batches * counts_s - ideal_s
    if life is ReplicaLife.ITERATION:
        savable_s -= float(price.gather_s)  # what was planned comes in any case
    one_way_s = min(link.time_s(profile.expert_bytes) for link in (cluster.intra, cluster.inter))
    if savable_s <= one_way_s:
        return None
    wanted = planner(planned.owner_E, counts, topology, overlap_degree=overlap_degree, slots=slots)
    additions = _additions(planned, wanted, counts.sum(axis=0), slots)
    best, best_gain_s = None, 0.0
    for num_experts in doubling(len(additions)):
        pairs = [pair for of_expert in additions[:num_experts] for pair in of_expert]
        candidate = planned.with_replicas(pairs, slots=slots)
        added = additional_transfer(planned, candidate, topology)
        if savable_s - transfer_seconds(added, profile.expert_bytes, topology, profile) <= best_gain_s:
            continue
        replicas = transfer_traffic(two_level_transfer(candidate, topology), topology)
        gain_s = price.moe_s - price_of(candidate, replicas, transfer_traffic(added, topology)).moe_s
        if gain_s > best_gain_s:
            best, best_gain_s = candidate, float(gain_s)
    return best


def _additions(
    planned: ExpertPlacement, wanted: ExpertPlacement, load_E: np.ndarray, slots: int
) -> list[list[tuple[int, int]]]:
    """The (expert, device) pairs to add, by expert in descending load, as far as slots are left."""
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
    """1, 2, 4, ... below ``most``, then ``most``; nothing for 0."""
    return [*(1 << i for i in range(max(most - 1, 0).bit_length())), most] if most else []
