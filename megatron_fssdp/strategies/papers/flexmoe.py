"""FlexMoE: resident replicas, which outlive iterations and have optimizer states like their owners."""

import numpy as np

from megatron_fssdp.config.strategy.shipped_settings import FlexmoeSettings
from megatron_fssdp.config.strategy.strategy_settings import profile_iterations
from megatron_fssdp.planning.cost.layer_seconds import moving_seconds
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.papers.flexmoe_planner import next_resident_placement
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_seconds import plan_price
from megatron_fssdp.strategies.strategy import ResidentReplicas

THRESHOLD = 1.1
"""Max/mean device load above which replicas are added or exchanged: below, steps save hardly anything."""

MOST_STEPS = 16
"""Most expansions, and most migrations, of a layer at a time; more are seldom needed at an interval."""


class FlexmoeStrategy(ResidentReplicas[FlexmoeSettings]):
    """``flexmoe``: expands, shrinks and migrates replicas every few iterations (Hecate §2.3, §5.1)."""

    def __init__(self, settings: FlexmoeSettings) -> None:
        super().__init__(settings)
        self.window, self.profile_iterations = settings.window, profile_iterations()
        self.overlaps, self.resident_slots = settings.overlap, settings.slots

    def slots(self, context: LayerContext) -> int:
        """Largest number of replicas of a layer on a device."""
        return self.resident_slots

    def replicates_at(self, iteration: int) -> bool:
        """Whether ``iteration`` is a multiple of ``placement_interval`` and not 0."""
        return iteration > 0 and iteration % self.settings.placement_interval == 0

    def replicate(self, context: LayerContext, load_DE: np.ndarray) -> ExpertPlacement:
        """The present placement, changed in steps that save seconds until replicas are reconsidered.

        The seconds of a layer are those of all-to-alls, experts, and what is exposed of the gradients'
        all-reduce.
        """
        present, profile, topology = context.placement, context.profile, context.topology
        if profile is None or not load_DE.any():
            return present
        counts_DE = np.rint(load_DE).astype(np.int64)

        def layer_s(placement: ExpertPlacement) -> float:
            plan, times = self._plan_of(placement, context), profile.num_micro_batches
            return plan_price(plan, counts_DE, context, num_micro_batches=times).seconds

        def saving_s(before: ExpertPlacement, after: ExpertPlacement) -> float:
            saved_s = layer_s(before) - layer_s(after)
            return self.settings.placement_interval * saved_s - self.moving_s(context, before, after)

        return next_resident_placement(
            *(present, counts_DE, topology, saving_s),
            slots=self.settings.slots,
            threshold=THRESHOLD,
            most_steps=MOST_STEPS,
        )

    def moving_s(self, context: LayerContext, before: ExpertPlacement, after: ExpertPlacement) -> float:
        """Seconds in which owners send parameters, masters and optimizer states to new replicas."""
        assert context.profile is not None
        expert_P, device_P = np.nonzero(after.present_ED & ~before.present_ED)
        return moving_seconds(before.owner_E[expert_P], device_P, context.topology, context.profile)

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """A plan with the present resident replicas."""
        return self._plan_of(context.placement, context)

    def _plan_of(self, placement: ExpertPlacement, context: LayerContext) -> LayerPlan:
        if not placement.num_replicas:
            return LayerPlan.owners_only(context)
        transfer = two_level_transfer(placement, context.topology)
        return LayerPlan(placement, transfer, gather_ahead=self.settings.overlap, resident=True)
