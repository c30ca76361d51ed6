"""What the strategies share that replicate experts by measured costs."""

from megatron_fssdp.config.strategy_settings import FastermoeSettings, ProphetSettings, QuotaSettings
from megatron_fssdp.strategies.replica_limits import described_slots, slots_of
from megatron_fssdp.strategies.strategy import LayerContext, Strategy


class MeasuredReplicas[Settings: (FastermoeSettings, ProphetSettings, QuotaSettings)](Strategy[Settings]):
    """Replicas by measured costs, with a bound for each device."""

    @property
    def profile_iterations(self) -> int:
        """Iterations to measure: until then nothing is replicated."""
        return self.settings.profile_iterations

    @property
    def overlaps(self) -> bool:
        """As set."""
        return self.settings.overlap

    def slots(self, context: LayerContext) -> int:
        """Most replicas that a device may hold of a layer."""
        return slots_of(self.settings.slots, context)

    def limits(self, context: LayerContext) -> str:
        """How many replicas a device may hold."""
        return described_slots(self.settings.slots, context)
