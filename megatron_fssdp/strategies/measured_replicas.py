"""A base class of the strategies that select replicas by measured costs."""

from megatron_fssdp.config.strategy_settings import FastermoeSettings, ProphetSettings, QuotaSettings
from megatron_fssdp.strategies.replica_limits import described_slots, slots_of
from megatron_fssdp.strategies.strategy import LayerContext, Strategy


class MeasuredReplicas[Settings: (FastermoeSettings, ProphetSettings, QuotaSettings)](Strategy[Settings]):
    """Selects replicas by measured costs, with a limit on the replicas of each device."""

    @property
    def profile_iterations(self) -> int:
        """Iterations to measure; nothing is replicated before these are complete."""
        return self.settings.profile_iterations

    @property
    def overlaps(self) -> bool:
        """Whether transfers may run beside compute: the setting ``overlap``."""
        return self.settings.overlap

    def slots(self, context: LayerContext) -> int:
        """Largest number of replicas of a layer on a device."""
        return slots_of(self.settings.slots, context)

    def limits(self, context: LayerContext) -> str:
        """The largest number of replicas on a device, as a text for the log."""
        return described_slots(self.settings.slots, context)
