"""Plain expert parallelism: every expert stays with its owner."""

from collections.abc import Sequence

import numpy as np

from megatron_fssdp.config.strategy_settings import EpSettings
from megatron_fssdp.planning.load_history import LoadHistory
from megatron_fssdp.planning.owner_map import OwnerMap
from megatron_fssdp.planning.placement import ExpertPlacement
from megatron_fssdp.planning.transfer_plan import TransferPlan
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan


class ExpertParallelism:
    """``ep``: the floor that every other strategy is measured against."""

    window = 1
    profile_iterations = 0

    def __init__(self, settings: EpSettings) -> None:
        self.settings = settings

    def slots(self, context: LayerContext) -> int:
        """None."""
        return 0

    def reshards_at(self, iteration: int) -> bool:
        """Never."""
        return False

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """The owners as they are."""
        return owners

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Owners only, whatever the loads."""
        return LayerPlan(
            placement=ExpertPlacement.owners_only(context.owner_E, context.num_devices),
            transfer=TransferPlan(context.num_devices, ()),
        )

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """The plan as it is."""
        return plan
