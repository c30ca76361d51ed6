"""Plain expert parallelism: every expert stays with its owner."""

import numpy as np

from megatron_fssdp.config.strategy_settings import EpSettings, ParmSettings
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.strategies.fixed_owners import FixedOwners
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan


class EpStrategy(FixedOwners):
    """``ep``: the floor that every other strategy is measured against."""

    window = 1
    profile_iterations = 0

    def __init__(self, settings: EpSettings | ParmSettings) -> None:
        self.settings = settings

    def slots(self, context: LayerContext) -> int:
        """None."""
        return 0

    def limits(self, context: LayerContext) -> str:
        """Nothing is measured."""
        return "nothing is replicated"

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Owners only, whatever the loads."""
        return LayerPlan.owners_only(context)

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """The plan as it is."""
        return plan
