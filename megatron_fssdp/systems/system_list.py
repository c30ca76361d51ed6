"""Systems of others by the names that ``simulate --strategies`` takes.

No strategy can have a name with a dash, so none of these can be trained.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings, SlotKeys
from megatron_fssdp.strategies.strategy import Strategy
from megatron_fssdp.systems.eplb import EplbKeys, EplbSystem
from megatron_fssdp.systems.exact_counts import (
    ExactCounts,
    UltraepKeys,
    equal_rows,
    least_loaded,
    quotas_in_nodes,
)


class SimulatedSystem(NamedTuple):
    """A system, its settings, its colour in pictures, and seconds in which a layer waits for its plan."""

    strategy: Callable[[Any], Strategy]
    settings: type[PlacementSettings]
    colour: str
    plan_s: float = 0.0


_ULTRAEP, _MOONEP, _LLEP = (
    lambda of, load_E, slots: quotas_in_nodes(of.owner_E, load_E, of.topology, slots=slots),
    lambda of, load_E, _: equal_rows(of.owner_E, load_E, of.num_devices),
    lambda of, load_E, _: least_loaded(of.owner_E, load_E, of.num_devices),
)

SYSTEMS = {
    "eplb-like": SimulatedSystem(EplbSystem, EplbKeys, "#66A61E"),
    # The longest `update_placement` in UltraEP's README, of 256 experts on 64 devices, taken for all sizes.
    "ultraep-like": SimulatedSystem(partial(ExactCounts, planner=_ULTRAEP), UltraepKeys, "#E7298A", 78e-6),
    "moonep-like": SimulatedSystem(partial(ExactCounts, planner=_MOONEP), SlotKeys, "#A6761D"),
    "llep-like": SimulatedSystem(partial(ExactCounts, planner=_LLEP), SlotKeys, "#7570B3"),
}
