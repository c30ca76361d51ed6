"""Every strategy by name: a literal dict, nothing registers itself."""

from collections.abc import Callable
from typing import Any

from megatron_fssdp.config.strategy_settings import AutoSettings, PlacementSettings
from megatron_fssdp.strategies.auto.auto_strategy import AutomaticChoice
from megatron_fssdp.strategies.ep import ExpertParallelism
from megatron_fssdp.strategies.fastermoe import DynamicShadowing
from megatron_fssdp.strategies.flexmoe import PersistentReplicas
from megatron_fssdp.strategies.fssdp import FullyShardedSparseDataParallelism
from megatron_fssdp.strategies.prophet import ProProphet
from megatron_fssdp.strategies.quota import ExactQuotas
from megatron_fssdp.strategies.smartmoe import ExpertExchange
from megatron_fssdp.strategies.strategy import Strategy


def _automatic(settings: AutoSettings) -> AutomaticChoice:
    return AutomaticChoice(
        settings, {name: build_strategy(name, keys) for name, keys in settings.candidates.items()}
    )


# `none` is absent on purpose: it means that the runtime is not installed at all.
_STRATEGIES: dict[str, Callable[[Any], Strategy]] = {
    "ep": ExpertParallelism,
    "fssdp": FullyShardedSparseDataParallelism,
    "fastermoe": DynamicShadowing,
    "prophet": ProProphet,
    "smartmoe": ExpertExchange,
    "flexmoe": PersistentReplicas,
    "quota": ExactQuotas,
    # What is its own is how tokens travel, which is the runtime's business; owners stay.
    "parm": ExpertParallelism,
    "auto": _automatic,
}


def build_strategy(name: str, settings: PlacementSettings) -> Strategy:
    """The strategy called ``name`` with validated settings.

    Raises:
        KeyError: ``name`` has no placement strategy; names are checked with the settings.
    """
    return _STRATEGIES[name](settings)
