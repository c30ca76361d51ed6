"""What strategies have in common: owners that stay, replicas or moves by measured costs."""

from collections.abc import Sequence

import numpy as np

from megatron_fssdp.config.strategy_settings import (
    FastermoeSettings,
    FlexmoeSettings,
    ProphetSettings,
    QuotaSettings,
    SmartmoeSettings,
)
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.strategies.replica_limits import described_slots, slots_of
from megatron_fssdp.strategies.strategy import LayerContext


class FixedOwners:
    """Nothing is re-sharded, and every layer can be served. Replicas, if any, are for an iteration."""

    replica_life = ReplicaLife.ITERATION

    def check(self, context: LayerContext) -> None:
        """Nothing to refuse."""

    def reshards_at(self, iteration: int) -> bool:
        """Never."""
        return False

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """The owners as they are."""
        return owners


class DecidedByHistory[Settings: (SmartmoeSettings, FlexmoeSettings)]:
    """Decides now and then, by the mean load of a window and by measured costs."""

    def __init__(self, settings: Settings) -> None:
        self.settings: Settings = settings

    @property
    def window(self) -> int:
        """Iterations whose mean load decides."""
        return self.settings.window

    @property
    def profile_iterations(self) -> int:
        """Iterations to measure: savings are compared with what a change moves."""
        return self.settings.profile_iterations


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
