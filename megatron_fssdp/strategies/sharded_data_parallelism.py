"""FSSDP: replicate the experts that the last iterations used most (Hecate §4.2)."""

from megatron_fssdp.config.strategy_settings import FssdpSettings
from megatron_fssdp.planning.load_history import LoadHistory
from megatron_fssdp.planning.materialization_planner import plan_materialization
from megatron_fssdp.planning.sparse_materialization import sparse_materialization
from megatron_fssdp.planning.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan


class FullyShardedSparseDataParallelism:
    """``fssdp``: a fresh placement each iteration, from the mean of the last ``window`` loads."""

    def __init__(self, settings: FssdpSettings) -> None:
        self.settings = settings

    @property
    def window(self) -> int:
        """Length of the sliding window of loads (Hecate §4.2, w)."""
        return self.settings.window

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Replicate by the predicted loads: Hecate's Alg. 1, or our search within its limits.

        Without any history yet, every expert stays with its owner.
        """
        overlap_degree = self.settings.overlap_degree
        limits = {
            "overlap_degree": context.num_experts if overlap_degree is None else overlap_degree,
            "slots": self.slots(context),
        }
        if self.settings.planner == "hecate":
            placement = sparse_materialization(context.owner_E, history.mean_E(), context.topology, **limits)
        else:
            placement = plan_materialization(context.owner_E, history.mean_DE(), context.topology, **limits)
        return LayerPlan(placement, two_level_transfer(placement, context.topology))

    def slots(self, context: LayerContext) -> int:
        """Extra expert slots a device has for one layer (Hecate, Alg. 1, m)."""
        if self.settings.slots is None:
            return -(-context.num_experts // context.num_devices)
        return self.settings.slots
