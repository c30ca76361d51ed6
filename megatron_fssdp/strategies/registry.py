"""From a registered name and its settings to a strategy."""

import importlib
from typing import Any

from megatron_fssdp.config.strategy_registry import STRATEGIES
from megatron_fssdp.config.strategy_settings import StrategySettings
from megatron_fssdp.strategies.strategy import Strategy


def build_strategy(name: str, settings: StrategySettings) -> Strategy:
    """The strategy called ``name`` with validated settings.

    Raises:
        KeyError: No strategy of this name plans anything; names are checked with the settings.
        TypeError: What is registered under the name makes no :class:`Strategy`.
    """
    entry = STRATEGIES[name]
    if entry.strategy is None:
        raise KeyError(name)
    make: Any = entry.strategy
    if isinstance(make, str):
        module, _, attribute = make.partition(":")
        make = getattr(importlib.import_module(module), attribute)
    strategy = make(settings)
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"strategy {name} of {entry.package}: got {type(strategy).__name__}, wanted an instance of "
            "megatron_fssdp.strategies.strategy.Strategy"
        )
    return strategy
