"""What strategies have in common that leave every expert with its first owner."""

from collections.abc import Sequence

import numpy as np

from megatron_fssdp.config.strategy_settings import FastermoeSettings, ProphetSettings, QuotaSettings
from megatron_fssdp.planning.owner_map import OwnerMap
from megatron_fssdp.strategies.replica_limits import described_slots, slots_of
from megatron_fssdp.strategies.strategy import LayerContext


class FixedOwners:
    """Nothing is re-sharded, and every layer can be served."""

    def check(self, context: LayerContext) -> None:
        """Nothing to refuse."""

    def reshards_at(self, iteration: int) -> bool:
        """Never."""
        return False

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """The owners as they are."""
        return owners


class MeasuredReplicas[Settings: (FastermoeSettings, ProphetSettings, QuotaSettings)](FixedOwners):
    """Replicas by measured costs, with a bound for each device."""

    def __init__(self, settings: Settings) -> None:
        self.settings: Settings = settings

    @property
    def profile_iterations(self) -> int:
        """Iterations to measure: until then nothing is replicated."""
        return self.settings.profile_iterations

    def slots(self, context: LayerContext) -> int:
        """Most replicas that a device may hold of a layer."""
        return slots_of(self.settings.slots, context)

    def limits(self, context: LayerContext) -> str:
        """How many replicas a device may hold."""
        return described_slots(self.settings.slots, context)
