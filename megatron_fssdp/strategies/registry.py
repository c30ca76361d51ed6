"""Every strategy by name: a literal dict, nothing registers itself."""

from collections.abc import Callable
from typing import Any

from megatron_fssdp.config.strategy_settings import AutoSettings, PlacementSettings
from megatron_fssdp.strategies.auto.auto_strategy import AutoStrategy
from megatron_fssdp.strategies.ep import EpStrategy
from megatron_fssdp.strategies.fastermoe import FastermoeStrategy
from megatron_fssdp.strategies.flexmoe import FlexmoeStrategy
from megatron_fssdp.strategies.fssdp import FssdpStrategy
from megatron_fssdp.strategies.prophet import ProphetStrategy
from megatron_fssdp.strategies.quota import QuotaStrategy
from megatron_fssdp.strategies.smartmoe import SmartmoeStrategy
from megatron_fssdp.strategies.strategy import Strategy


def _automatic(settings: AutoSettings) -> AutoStrategy:
    return AutoStrategy(
        settings, {name: build_strategy(name, keys) for name, keys in settings.candidates.items()}
    )


# `none` is absent on purpose: it means that the runtime is not installed at all.
_STRATEGIES: dict[str, Callable[[Any], Strategy]] = {
    "ep": EpStrategy,
    "fssdp": FssdpStrategy,
    "fastermoe": FastermoeStrategy,
    "prophet": ProphetStrategy,
    "smartmoe": SmartmoeStrategy,
    "flexmoe": FlexmoeStrategy,
    "quota": QuotaStrategy,
    # What is its own is how tokens travel, which is the runtime's business; owners stay.
    "parm": EpStrategy,
    "auto": _automatic,
}


def build_strategy(name: str, settings: PlacementSettings) -> Strategy:
    """The strategy called ``name`` with validated settings.

    Raises:
        KeyError: ``name`` has no placement strategy; names are checked with the settings.
    """
    return _STRATEGIES[name](settings)
