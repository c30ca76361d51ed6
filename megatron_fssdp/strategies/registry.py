"""Builds a strategy from its registered name and its settings."""

import pkgutil
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_registry import SHIPPED, STRATEGIES
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings
from megatron_fssdp.strategies.strategy import MovesOwners, ResidentReplicas, Strategy


def build_strategy(name: str, settings: StrategySettings) -> Strategy:
    """Build the strategy that is registered under a name, with its validated settings.

    Raises:
        KeyError: The name is not registered, or has no strategy class (``none``).
        ConfigurationError: A strategy of another package cannot be built, or lacks the methods of an ability
            that it declares; the line names the package.
    """
    entry = STRATEGIES[name]
    if entry.strategy is None:
        raise KeyError(name)
    subject = f"strategy {name} of package {entry.package}"
    make: Any = entry.strategy
    try:
        if isinstance(make, str):
            make = pkgutil.resolve_name(make)
        if missing := sorted(getattr(make, "__abstractmethods__", ())):
            raise TypeError(f"{make.__name__} does not implement {', '.join(missing)}")
        strategy = make(settings)
    except Exception as error:
        if entry.package == SHIPPED:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigurationError(f"{subject} cannot be built: {reason}; update the package") from error
    kind = type(strategy).__name__
    if not isinstance(strategy, Strategy):
        raise ConfigurationError(
            f"{subject}: got {kind}, wanted a megatron_fssdp.strategies.strategy.Strategy; derive the class "
            "from it"
        )
    for ability, base in (("moves_owners", MovesOwners), ("resident_slots", ResidentReplicas)):
        if getattr(strategy, ability) and not isinstance(strategy, base):
            raise ConfigurationError(
                f"{subject}: got {ability} without its methods, wanted a subclass of {base.__name__}; derive "
                f"{kind} from it"
            )
    if strategy.selects and entry.package != SHIPPED:
        raise ConfigurationError(
            f"{subject}: got selects, wanted a strategy of its own; only auto selects others"
        )
    strategy.package = entry.package
    return strategy
