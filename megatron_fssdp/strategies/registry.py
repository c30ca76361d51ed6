"""From a registered name and its settings to a strategy."""

import importlib
import logging
from typing import Any

from megatron_fssdp.config.strategy_registry import SHIPPED, STRATEGIES
from megatron_fssdp.config.strategy_settings import AutoSettings, StrategySettings
from megatron_fssdp.strategies.auto.auto_strategy import AutoStrategy
from megatron_fssdp.strategies.strategy import Strategy

logger = logging.getLogger(__name__)


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


def automatic(settings: AutoSettings) -> AutoStrategy:
    """``auto`` with its candidates.

    A candidate of another package that cannot be built, or that a single layer cannot have, is left out with
    a warning, because whoever asks for ``auto`` need not know it.
    """
    candidates = {}
    for name, keys in settings.candidates.items():
        try:
            candidates[name] = _candidate(name, keys)
        except Exception as error:
            if STRATEGIES[name].package == SHIPPED:
                raise
            logger.warning(
                f"[fssdp] auto: candidate '{name}' of {STRATEGIES[name].package} is left out: {error}; leave "
                f"it out yourself with --moe-strategy-set {name}=false, or update the package"
            )
    return AutoStrategy(settings, candidates)


def _candidate(name: str, settings: StrategySettings) -> Strategy:
    candidate = build_strategy(name, settings)
    if candidate.resident_slots or candidate.selects:
        raise ValueError(
            "got a strategy with resident replicas or candidates of its own, wanted one that a layer can "
            "change to and from between iterations"
        )
    return candidate
