"""From ``auto``'s settings to the strategy with its candidates."""

import logging

from megatron_fssdp.config.strategy.own_strategy_settings import AutoSettings
from megatron_fssdp.config.strategy.strategy_registry import SHIPPED, STRATEGIES
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings
from megatron_fssdp.strategies.auto.auto_strategy import AutoStrategy
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import Strategy

logger = logging.getLogger(__name__)


def build_auto(settings: AutoSettings) -> AutoStrategy:
    """Build ``auto`` with its candidates.

    A candidate of another package may fail to build, or may have abilities that one layer alone cannot use.
    Such a candidate is left out with a warning, because a user of ``auto`` may not know that it exists.

    Args:
        settings: The settings of ``auto``, which hold those of every candidate.

    Raises:
        Exception: Whatever a shipped candidate raises while it is built.
    """
    candidates, priced = {}, {}
    for name, keys in settings.candidates.items():
        try:
            candidates[name], priced[name] = _candidate(name, keys), _candidate(name, keys)
        except Exception as error:
            package = STRATEGIES[name].package
            if package == SHIPPED:
                raise
            logger.warning(
                f"[fssdp] auto: candidate '{name}' of package {package} is left out: {error}; update the "
                f"package, or leave the candidate out with --moe-strategy-set {name}=false"
            )
    return AutoStrategy(settings, candidates, priced)


def _candidate(name: str, settings: StrategySettings) -> Strategy:
    candidate = build_strategy(name, settings)
    if candidate.resident_slots or candidate.selects:
        raise ValueError(
            "got a strategy with resident replicas or with candidates of its own, wanted a strategy that a "
            "layer can start and stop using between two iterations"
        )
    return candidate
