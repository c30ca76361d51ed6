"""Plain expert parallelism: the floor, and the base of strategies without replicas.

Shape letters: D devices, E experts.
"""

from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings, profile_iterations
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.strategy import Strategy


class EpStrategy[Settings: PlacementSettings](Strategy[Settings]):
    """``ep``: every expert stays with its owner. It is also the base of strategies without replicas."""

    overlaps = False  # The strategy has no transfers.

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if self.travel.compares_prices:
            self.profile_iterations = profile_iterations()

    def may_replicate(self, layer: int) -> bool:
        """False: no layer has replicas."""
        return False

    def slots(self, context: LayerContext) -> int:
        """Zero: the strategy has no replicas."""
        return 0

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """A plan without replicas, independent of the loads."""
        return LayerPlan.owners_only(context)
