"""Builds a strategy from its registered name and its settings."""

import importlib
from typing import Any

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings
from megatron_fssdp.strategies.strategy import Strategy


def build_strategy(name: str, settings: StrategySettings) -> Strategy:
    """Build the strategy that is registered under a name.

    Args:
        name: Name of the strategy.
        settings: Validated settings of the strategy.

    Raises:
        KeyError: The name is not registered, or it has no strategy class (``none``). The validation of the
            settings reports unknown names to the user before.
        TypeError: The registered class or function does not return a :class:`Strategy`.
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
            "megatron_fssdp.strategies.strategy.Strategy; derive the registered class from it"
        )
    return strategy
