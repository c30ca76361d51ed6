"""Plain expert parallelism: every expert stays with its owner."""

from megatron_fssdp.config.strategy_settings import EpSettings
from megatron_fssdp.planning.load_history import LoadHistory
from megatron_fssdp.planning.placement import ExpertPlacement
from megatron_fssdp.planning.transfer_plan import TransferPlan
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan


class ExpertParallelism:
    """``ep``: the floor that every other strategy is measured against."""

    window = 1

    def __init__(self, settings: EpSettings) -> None:
        self.settings = settings

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Owners only, whatever the loads."""
        return LayerPlan(
            placement=ExpertPlacement.owners_only(context.owner_E, context.num_devices),
            transfer=TransferPlan(context.num_devices, ()),
        )
