"""FlexMoE: resident replicas, which are expanded, shrunk and migrated at an interval.

Shape letters: D devices, E experts.
"""

from functools import cache
from typing import Any

import numpy as np

from megatron_fssdp.config.strategy.strategy_settings import profile_iterations
from megatron_fssdp.planning.cost.layer_seconds import moving_seconds
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.flexmoe import FlexmoeSettings
from megatron_fssdp.strategies.flexmoe.flexmoe_planner import next_resident_placement
from megatron_fssdp.strategies.layer_plan import LastPlans, LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import plan_price
from megatron_fssdp.strategies.strategy import ResidentReplicas

FLEXMOE_THRESHOLD = 1.1
"""Max/mean device load above which replicas are added or exchanged: below, steps save hardly anything."""


FLEXMOE_STEPS = 16
"""Most expansions, and most migrations, of a layer at a time; more are seldom needed at an interval."""


class FlexmoeStrategy(ResidentReplicas[FlexmoeSettings]):
    """``flexmoe``: expands, shrinks and migrates resident replicas at an interval (Hecate §2.3, §5.1)."""

    def __init__(self, settings: FlexmoeSettings) -> None:
        super().__init__(settings)
        self.window, self.profile_iterations = settings.window, profile_iterations()
        self.overlaps, self.resident_slots = settings.overlap, settings.slots
        self._plans = LastPlans()
        self._settled: dict[int, tuple[Any, ...]] = {}
        """Layers whose placement no step improved, with the costs and loads for which they were asked."""

    def slots(self, context: LayerContext) -> int:
        """Largest number of replicas of a layer on a device."""
        return self.resident_slots

    def replicates_at(self, iteration: int) -> bool:
        """Whether ``iteration`` is a multiple of ``placement_interval`` and not 0."""
        return iteration > 0 and iteration % self.settings.placement_interval == 0

    def replicate(self, context: LayerContext, load_DE: np.ndarray) -> ExpertPlacement:
        """The present placement, changed in steps that save seconds until replicas are reconsidered."""
        present = context.placement
        if context.profile is None or not load_DE.any():
            return present
        placement, profile, settled_DE = self._settled.get(context.layer, (None, None, None))
        if placement is present and profile is context.profile and np.array_equal(settled_DE, load_DE):
            return present
        counts_DE = np.rint(load_DE).astype(np.int64)

        @cache
        def layer_s(placement: ExpertPlacement) -> float:
            return plan_price(self._plan_of(placement, context), counts_DE, context).seconds

        def saving_s(before: ExpertPlacement, after: ExpertPlacement) -> float:
            saved_s = layer_s(before) - layer_s(after)
            return self.settings.placement_interval * saved_s - self.moving_s(context, before, after)

        found = next_resident_placement(
            *(present, counts_DE, context.topology, saving_s),
            slots=self.settings.slots,
            threshold=FLEXMOE_THRESHOLD,
            most_steps=FLEXMOE_STEPS,
        )
        if found is present:
            self._settled[context.layer] = present, context.profile, load_DE
        return found

    def moving_s(self, context: LayerContext, before: ExpertPlacement, after: ExpertPlacement) -> float:
        """Seconds in which owners send experts with their states to new replicas."""
        expert_P, device_P = np.nonzero(after.present_ED & ~before.present_ED)
        return moving_seconds(before.owner_E[expert_P], device_P, context.topology, context.costs)

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """A plan with the present resident replicas."""
        return self._plans.of(
            context, None, context.owner_E, lambda: self._plan_of(context.placement, context)
        )

    def _plan_of(self, placement: ExpertPlacement, context: LayerContext) -> LayerPlan:
        if not placement.num_replicas:
            return LayerPlan.owners_only(context)
        transfer = two_level_transfer(placement, context.topology)
        return LayerPlan(placement, transfer, gather_ahead=self.settings.overlap, resident=True)
