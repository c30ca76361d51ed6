"""FlexMoE: resident replicas, which outlive iterations and have optimizer states like their owners."""

import numpy as np

from megatron_fssdp.config.strategy.shipped_settings import FlexmoeSettings
from megatron_fssdp.config.strategy.strategy_settings import profile_iterations
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.papers.flexmoe_planner import ReplicaPrice, next_resident_placement
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
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

    def limits(self, context: LayerContext) -> str:
        """The slots and the interval at which replicas are reconsidered, as a text for the log."""
        return (
            f"slots m = {self.settings.slots}, replicas are reconsidered every "
            f"{self.settings.placement_interval} iterations"
        )

    def replicates_at(self, iteration: int) -> bool:
        """Whether ``iteration`` is a multiple of ``placement_interval`` and not 0."""
        return iteration > 0 and iteration % self.settings.placement_interval == 0

    def replicate(self, context: LayerContext, load_DE: np.ndarray) -> ExpertPlacement:
        """The present placement, changed in steps that save seconds (:meth:`ReplicaPrice.saving_s`)."""
        present = context.placement
        if context.profile is None or not load_DE.any():
            return present
        price = ReplicaPrice(
            np.rint(load_DE).astype(np.int64),
            context.topology,
            context.profile,
            self.settings.placement_interval,
        )
        slots = self.settings.slots
        return next_resident_placement(
            present, price, slots=slots, threshold=THRESHOLD, most_steps=MOST_STEPS
        )

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """A plan with the present resident replicas."""
        placement = context.placement
        if not placement.num_replicas:
            return LayerPlan.owners_only(context)
        return LayerPlan(
            placement,
            two_level_transfer(placement, context.topology),
            gather_ahead=self.settings.overlap,
            resident=True,
        )
