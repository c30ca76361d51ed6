"""Plain expert parallelism: every expert stays with its owner."""

from megatron_fssdp.config.strategy_settings import PlacementSettings
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan, Strategy


class EpStrategy(Strategy[PlacementSettings]):
    """``ep``: the floor that every other strategy is measured against."""

    overlaps = False  # there are no transfers

    def may_replicate(self, layer: int) -> bool:
        """Never."""
        return False

    def slots(self, context: LayerContext) -> int:
        """No replicas."""
        return 0

    def limits(self, context: LayerContext) -> str:
        """Nothing is measured."""
        return "nothing is replicated"

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Owners only, whatever the loads."""
        return LayerPlan.owners_only(context)
