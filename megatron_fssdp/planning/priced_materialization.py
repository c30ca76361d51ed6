"""How many experts to replicate when their transfers cost more than compute hides.

Ours, beyond the papers. Hecate (§4.2) replicates as many experts as travel under the compute
before the layer and no more. But one more may save more than its transfer exposes, and one less may cost
nothing; so here the modelled seconds of the layer decide, plain expert parallelism included.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning import cost_model
from megatron_fssdp.planning.calibration import doubling
from megatron_fssdp.planning.layer_profile import LayerProfile
from megatron_fssdp.planning.materialization_planner import plan_materialization
from megatron_fssdp.planning.placement import ExpertPlacement
from megatron_fssdp.planning.token_dispatch import DispatchPolicy
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.planning.transfer_plan import two_level_transfer

LEAST_SAVING = 0.01
"""Part of plain expert parallelism's seconds that more replicas must save: less is within what the
model does not know."""

LEAST_CONSIDERED, CONSIDERED_OVER_HIDDEN = 16, 2
"""At most so many experts are considered, or so many times those whose transfers hide: more would cost the
host more than they save a device."""


@dataclass(frozen=True)
class LayerPrice:
    """Modelled seconds of one layer in an iteration under a placement.

    Attributes:
        counts_DE: (token, k) pairs of an iteration by source and expert, int64 ``[D, E]``.
        topology: Nodes of the devices.
        profile: Measured costs.
        dispatch_policy: How the tokens are split among holders.
        rematerialize: Whether every micro-batch gathers twice and reduces once, instead of an iteration.
    """

    counts_DE: np.ndarray
    topology: Topology
    profile: LayerProfile
    dispatch_policy: DispatchPolicy = "even"
    rematerialize: bool = False

    def seconds(self, placement: ExpertPlacement) -> float:
        """All-to-alls, experts, and what attention does not hide of spAG and spRS."""
        layer_s = cost_model.dispatched_layer_s(
            self.counts_DE,
            placement,
            self.topology,
            cluster=self.profile.cluster,
            token_bytes=self.profile.token_bytes,
            flops_per_token=self.profile.flops_per_token,
            dispatch_policy=self.dispatch_policy,
        )
        return layer_s + sum(self.exposed_s(placement))

    def exposed_s(self, placement: ExpertPlacement) -> tuple[float, float]:
        """Seconds of spAG and of spRS that compute does not hide.

        They hide under the compute before the layer, in its backward pass under twice as much.
        """
        if not placement.num_replicas:
            return 0.0, 0.0
        profile = self.profile
        plan = two_level_transfer(placement, self.topology)
        gather_s = cost_model.transfer_s(plan, profile.expert_bytes, self.topology, profile.cluster)
        reduce_s = gather_s
        if profile.gradient_bytes is not None and profile.gradient_bytes != profile.expert_bytes:
            reduce_s = cost_model.transfer_s(plan, profile.gradient_bytes, self.topology, profile.cluster)
        forward_s, backward_s = profile.non_moe_s, cost_model.BACKWARD_PER_FORWARD * profile.non_moe_s
        if not self.rematerialize:
            return cost_model.exposed_s(gather_s, forward_s), cost_model.exposed_s(reduce_s, backward_s)
        # Every micro-batch gathers, gathers again beside the backward pass, and reduces.
        times = profile.num_micro_batches
        return (
            times * cost_model.exposed_s(gather_s, forward_s),
            times * cost_model.exposed_s(gather_s + reduce_s, backward_s),
        )


def priced_materialization(
    owner_E: np.ndarray,
    load_DE: np.ndarray,
    topology: Topology,
    *,
    slots: int,
    profile: LayerProfile,
    dispatch_policy: DispatchPolicy = "even",
    rematerialize: bool = False,
) -> ExpertPlacement:
    """The cheapest of several placements by :class:`LayerPrice`.

    The search plans for many experts (:func:`plan_materialization`). Of its result none, the
    replicas of the most loaded 1, 2, 4, … experts, and all are compared; the best number is then
    planned anew, because a search that may replicate only so many places them otherwise.

    Args:
        owner_E: Owner of every expert, integers [E].
        load_DE: Expected load of an iteration by source and expert, [D, E].
        topology: Nodes of the devices.
        slots: Most replicas a device may hold, m.
        profile: Measured costs, the same numbers on all ranks.
        dispatch_policy: How the tokens are split among holders.
        rematerialize: Whether replicas are gathered and reduced with every micro-batch.

    Returns:
        A placement whose modelled seconds are at most the owners-only one's.
    """
    considered = max(LEAST_CONSIDERED, CONSIDERED_OVER_HIDDEN * profile.overlap_degree(topology))
    everything = plan_materialization(owner_E, load_DE, topology, overlap_degree=considered, slots=slots)
    if not everything.num_replicas:
        return everything
    load_E = np.asarray(load_DE).sum(axis=0)
    replicated = np.flatnonzero(np.count_nonzero(everything.present_ED, axis=1) > 1)
    replicated = replicated[np.argsort(-load_E[replicated], kind="stable")]
    counts_DE = np.rint(load_DE).astype(np.int64)
    price = LayerPrice(counts_DE, topology, profile, dispatch_policy, rematerialize)
    owners_only = ExpertPlacement.owners_only(owner_E, topology.num_devices)
    plain_s = price.seconds(owners_only)
    if not any(price.exposed_s(everything)):
        # Fewer experts would cost no less.
        saves = price.seconds(everything) < (1 - LEAST_SAVING) * plain_s
        return everything if saves else owners_only
    best, best_s, best_number = owners_only, plain_s, 0
    dearer_in_turn = 0
    for number in doubling(len(replicated)):
        candidate = _of_experts(everything, replicated[:number])
        seconds = price.seconds(candidate)
        dearer_in_turn = dearer_in_turn + 1 if best_number and seconds >= best_s else 0
        if dearer_in_turn == 2:
            break  # more experts expose more
        if seconds < best_s - LEAST_SAVING * plain_s:
            best, best_s, best_number = candidate, seconds, number
    if 0 < best_number < len(replicated):
        again = plan_materialization(owner_E, load_DE, topology, overlap_degree=best_number, slots=slots)
        if price.seconds(again) < best_s:
            best = again
    return best


def _of_experts(placement: ExpertPlacement, experts: np.ndarray) -> ExpertPlacement:
    """The owners, and the replicas of some experts only."""
    present_ED = np.zeros_like(placement.present_ED)
    present_ED[np.arange(placement.num_experts), placement.owner_E] = True
    present_ED[experts] = placement.present_ED[experts]
    return ExpertPlacement(placement.owner_E, present_ED, slots=placement.slots)
