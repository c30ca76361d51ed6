"""Systems of others by the names that ``simulate --strategies`` takes.

No strategy can have a name with a dash, so none of these can be trained.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings, SlotKeys
from megatron_fssdp.strategies.strategy import Strategy
from megatron_fssdp.systems.eplb import EplbKeys, EplbSystem
from megatron_fssdp.systems.exact_counts import (
    LlepSystem,
    MoonepSystem,
    UltraepKeys,
    UltraepSystem,
)


class SimulatedSystem(NamedTuple):
    """A system, its settings, its colour in pictures, and seconds in which a layer waits for its plan."""

    strategy: Callable[[Any], Strategy]
    settings: type[PlacementSettings]
    colour: str
    plan_s: float = 0.0


SYSTEMS = {
    "eplb-like": SimulatedSystem(EplbSystem, EplbKeys, "#66A61E"),
    # The longest `update_placement` in UltraEP's README, of 256 experts on 64 devices, taken for all sizes.
    "ultraep-like": SimulatedSystem(UltraepSystem, UltraepKeys, "#E7298A", 78e-6),
    "moonep-like": SimulatedSystem(MoonepSystem, SlotKeys, "#A6761D"),
    "llep-like": SimulatedSystem(LlepSystem, SlotKeys, "#7570B3"),
}
