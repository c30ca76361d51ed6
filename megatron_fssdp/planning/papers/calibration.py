"""Correcting a layer's placement once the gate has decided (Hecate, §4.2, calibration).

Shape letters: E experts, D devices.
"""

from typing import Protocol

import numpy as np

from megatron_fssdp.planning.cost import cost_model
from megatron_fssdp.planning.cost.cost_model import ClusterCost
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy
from megatron_fssdp.planning.loads.checked_loads import checked_counts
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
    cluster: ClusterCost,
    expert_bytes: int,
    token_bytes: float,
    flops_per_token: float,
    num_micro_batches: int = 1,
    dispatch_policy: DispatchPolicy = "even",
    gradient_bytes: int | None = None,
    reduce_hidden_under_s: float = 0.0,
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

    A candidate's gain is what the layer saves (:func:`cost_model.layer_s` with the exact
    dispatch) in every micro-batch, taking the others to be like this one, less the gather of
    the additions, all of it on the critical path, and less what the longer reduction exposes.
    The host's own time to find it is not counted.

    Args:
        planned: The placement whose replicas are there or under way.
        counts_DE: (token, k) pairs that every device routes to every expert, int64 ``[D, E]``.
        topology: Nodes of the devices.
        overlap_degree: Most experts that gain replicas, t.
        slots: Most replicas a device may hold altogether, m.
        planner: Plans the layer anew; :func:`sparse_materialization_by_source` for Alg. 1.
        cluster: Link and compute costs, the same numbers on all ranks.
        expert_bytes: Parameters of one expert.
        token_bytes: One token's hidden state.
        flops_per_token: Forward of one expert for one token.
        num_micro_batches: How many micro-batches run under the placement before it is planned again.
        dispatch_policy: How the tokens are split among holders.
        gradient_bytes: One expert's gradient on its way home; None for ``expert_bytes``.
        reduce_hidden_under_s: Seconds of compute under which SparseReduceScatter hides.

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

    def seconds_of_layer(placement: ExpertPlacement) -> float:
        return num_micro_batches * cost_model.dispatched_layer_s(
            counts,
            placement,
            topology,
            cluster=cluster,
            token_bytes=token_bytes,
            flops_per_token=flops_per_token,
            dispatch_policy=dispatch_policy,
        )

    def seconds_of_reduction(placement: ExpertPlacement) -> float:
        plan = two_level_transfer(placement, topology)
        reduced_bytes = expert_bytes if gradient_bytes is None else gradient_bytes
        reduce_s = cost_model.transfer_s(plan, reduced_bytes, topology, cluster)
        return cost_model.exposed_s(reduce_s, reduce_hidden_under_s)

    planned_s = seconds_of_layer(planned)
    mean_tokens_D = np.array([counts.sum() / planned.num_devices])
    ideal_s = num_micro_batches * cost_model.layer_s(
        all_to_all_s=0.0,
        expert_forward_s=cost_model.expert_forward_s(mean_tokens_D, flops_per_token, cluster),
        exposed_gather_s=0.0,
        exposed_reduce_s=0.0,
    )
    # No placement saves more than what separates this one from a balanced layer without traffic:
    # where that does not pay for one expert's way, the planner need not run.
    if planned_s - ideal_s <= min(cluster.intra.time_s(expert_bytes), cluster.inter.time_s(expert_bytes)):
        return None
    wanted = planner(planned.owner_E, counts, topology, overlap_degree=overlap_degree, slots=slots)
    additions = _additions(planned, wanted, counts.sum(axis=0), slots)
    planned_reduce_s = seconds_of_reduction(planned) if additions else 0.0
    best, best_gain_s = None, 0.0
    for num_experts in doubling(len(additions)):
        pairs = [pair for of_expert in additions[:num_experts] for pair in of_expert]
        candidate = planned.with_replicas(pairs, slots=slots)
        gather = additional_transfer(planned, candidate, topology)
        added_s = cost_model.transfer_s(gather, expert_bytes, topology, cluster)
        if planned_s - ideal_s - added_s <= best_gain_s:
            continue
        added_s += max(0.0, seconds_of_reduction(candidate) - planned_reduce_s)
        gain_s = planned_s - seconds_of_layer(candidate) - added_s
        if gain_s > best_gain_s:
            best, best_gain_s = candidate, gain_s
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
