"""Builds a strategy from its registered name and its settings."""

import importlib
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_registry import SHIPPED, STRATEGIES
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings
from megatron_fssdp.strategies.strategy import Strategy


def build_strategy(name: str, settings: StrategySettings) -> Strategy:
    """Build the strategy that is registered under a name, with its validated settings.

    Raises:
        KeyError: The name is not registered, or it has no strategy class (``none``). The validation of the
            settings reports unknown names to the user before.
        ConfigurationError: A strategy of another package cannot be built; the line names the package.
    """
    entry = STRATEGIES[name]
    if entry.strategy is None:
        raise KeyError(name)
    make: Any = entry.strategy
    try:
        if isinstance(make, str):
            module, _, attribute = make.partition(":")
            make = getattr(importlib.import_module(module), attribute)
        if missing := sorted(getattr(make, "__abstractmethods__", ())):
            raise TypeError(f"{make.__name__} does not implement {', '.join(missing)}")
        strategy = make(settings)
        if not isinstance(strategy, Strategy):
            raise TypeError(
                f"got {type(strategy).__name__}, wanted a subclass of "
                "megatron_fssdp.strategies.strategy.Strategy"
            )
    except Exception as error:
        if entry.package == SHIPPED:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigurationError(
            f"strategy {name} of package {entry.package} cannot be built: {reason}; update the package"
        ) from error
    strategy.package = entry.package
    return strategy
