"""Builds the validated settings of a strategy from its name, a file and overrides."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import apply_overrides, load_yaml, unknown_name, validate
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings


def resolve_strategy(
    name: str, config_path: Path | str | None = None, overrides: Iterable[str] = ()
) -> tuple[str, StrategySettings]:
    """Return the name of a strategy and its settings: the keys of a YAML file, then ``key=value`` overrides.

    Raises:
        ConfigurationError: The strategy or a key is unknown, a value has the wrong type, or settings exclude
            each other.
    """
    overrides = list(overrides)
    data = load_yaml(config_path) if config_path is not None else {}
    sources = [str(config_path)] if config_path is not None else []
    sources += ["--moe-strategy-set"] if overrides else []
    data = apply_overrides(data, overrides, "--moe-strategy-set")
    return name, strategy_settings(name, data, " + ".join(sources) or "defaults")


def strategy_settings(name: str, data: dict[str, Any], source: str) -> StrategySettings:
    """Validate a strategy's keys, which a file or option ``source`` gives.

    Raises:
        ConfigurationError: As for :func:`resolve_strategy`.
    """
    if name not in STRATEGIES:
        broken = STRATEGIES.broken.get(name)
        raise ConfigurationError(str(broken) if broken else unknown_name("MoE strategy", name, STRATEGIES))
    entry = STRATEGIES[name]
    for key in data:
        owners = [other for other, one in STRATEGIES.items() if key in one.settings.model_fields]
        if owners and name not in owners:
            reason = "" if entry.strategy else ", which runs Megatron's own dispatcher and plans nothing"
            raise ConfigurationError(
                f"{source}: key '{key}' has no meaning under strategy '{name}'{reason}; it belongs to "
                f"{', '.join(owners)}; remove the key, or select another strategy with --moe-strategy"
            )
    return validate(entry.settings, data, f"{source} (strategy {name})")
