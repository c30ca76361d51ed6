"""From a strategy's name, file and overrides to its validated settings."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import apply_overrides, load_yaml, unknown_name, validate
from megatron_fssdp.config.renamed_settings import refuse_renamed_settings
from megatron_fssdp.config.strategy_settings import (
    AutoSettings,
    EpSettings,
    FastermoeSettings,
    FlexmoeSettings,
    FssdpSettings,
    MeasuringSettings,
    NoneSettings,
    ParmSettings,
    PlacementSettings,
    ProphetSettings,
    QuotaSettings,
    SmartmoeSettings,
    StrategySettings,
)

SETTINGS_BY_STRATEGY: dict[str, type[StrategySettings]] = {
    "none": NoneSettings,
    "ep": EpSettings,
    "fssdp": FssdpSettings,
    "fastermoe": FastermoeSettings,
    "prophet": ProphetSettings,
    "smartmoe": SmartmoeSettings,
    "flexmoe": FlexmoeSettings,
    "quota": QuotaSettings,
    "parm": ParmSettings,
    "auto": AutoSettings,
}


def resolve_strategy(
    name: str, config_path: Path | str | None = None, overrides: Iterable[str] = ()
) -> tuple[str, StrategySettings]:
    """Choose a strategy and build its settings.

    Args:
        name: A key of :data:`SETTINGS_BY_STRATEGY`.
        config_path: YAML file with the strategy's own keys, flat.
        overrides: ``key=value`` settings, relative to the strategy; they win over the file.

    Returns:
        The name and the settings.

    Raises:
        ConfigurationError: Unknown strategy, unknown or ill-typed key, or settings that exclude each other.
    """
    overrides = list(overrides)
    data = load_yaml(config_path) if config_path is not None else {}
    sources = [str(config_path)] if config_path is not None else []
    sources += ["--moe-strategy-set"] if overrides else []
    return name, strategy_settings(name, apply_overrides(data, overrides), " + ".join(sources) or "defaults")


def strategy_settings(name: str, data: dict[str, Any], source: str) -> StrategySettings:
    """Validate one strategy's keys.

    Args:
        name: The strategy.
        data: Its keys, flat.
        source: Where they come from; starts the message.

    Returns:
        The settings.

    Raises:
        ConfigurationError: As :func:`resolve_strategy`.
    """
    if name not in SETTINGS_BY_STRATEGY:
        raise ConfigurationError(unknown_name("MoE strategy", name, SETTINGS_BY_STRATEGY))
    refuse_renamed_settings(data, source, SETTINGS_BY_STRATEGY[name].model_fields)
    _refuse_keys_of_other_strategies(name, data, source)
    settings = validate(SETTINGS_BY_STRATEGY[name], data, f"{source} (strategy {name})")
    if isinstance(settings, PlacementSettings):
        _refuse_half_a_gate(settings, f"{source} (strategy {name})")
    if isinstance(settings, ParmSettings) and settings.cluster is not None and settings.schedule != "auto":
        raise ConfigurationError(
            f"{source} (strategy {name}): cluster {settings.cluster} has no meaning under schedule "
            f"{settings.schedule}, which is not decided by costs: drop it, or set schedule to auto"
        )
    if isinstance(settings, AutoSettings):
        _refuse_keys_of_all_candidates(settings, f"{source} (strategy {name})")
    if isinstance(settings, FssdpSettings):
        _refuse_contradictions(settings, f"{source} (strategy {name})")
    return settings


def _refuse_keys_of_other_strategies(name: str, data: dict[str, Any], source: str) -> None:
    own = SETTINGS_BY_STRATEGY[name].model_fields
    for key in data:
        owners = [other for other, model in SETTINGS_BY_STRATEGY.items() if key in model.model_fields]
        if key in own or not owners:
            continue
        reason = " which runs Megatron's own dispatcher and plans nothing" if name == "none" else ""
        raise ConfigurationError(
            f"{source}: key '{key}' has no meaning under strategy '{name}'{',' + reason if reason else ''}; "
            f"it belongs to {', '.join(owners)}: choose --moe-strategy {owners[-1]} or drop the key"
        )


def _refuse_half_a_gate(settings: PlacementSettings, source: str) -> None:
    if settings.router == "topology_aware" and settings.leaving_share is None:
        raise ConfigurationError(
            f"{source}: router topology_aware needs leaving_share, a number from 0 to 1: W_net / (M * "
            "W_local) for nodes of M devices, with the bandwidths that megatron-fssdp profile measures"
        )
    if settings.router == "stock" and settings.leaving_share is not None:
        raise ConfigurationError(
            f"{source}: leaving_share {settings.leaving_share} has no meaning under router stock: set router "
            "to topology_aware, which changes the routing, or drop leaving_share"
        )


def _refuse_keys_of_all_candidates(settings: AutoSettings, source: str) -> None:
    """Candidates share a runtime, and what is decided for all of them is no candidate's to say."""
    shared = {*MeasuringSettings.model_fields, "overlap"}
    for name in type(settings).model_fields:
        candidate = getattr(settings, name)
        if not isinstance(candidate, MeasuringSettings):
            continue
        own = shared | {"reshard_interval"} if isinstance(candidate, FssdpSettings) else shared
        if wrong := sorted(own & candidate.model_fields_set):
            known = sorted(set(type(candidate).model_fields) - own)
            raise ConfigurationError(
                f"{source}: {name}.{wrong[0]} has no meaning for a candidate, because all of them run on one "
                f"runtime and with the same owners; wanted {', '.join(known)}: drop the key"
            )
        if isinstance(candidate, FssdpSettings):
            _refuse_contradictions(candidate, f"{source}, {name}")


def _refuse_contradictions(settings: FssdpSettings, source: str) -> None:
    slots, degree = settings.slots, settings.overlap_degree
    if degree == 0 and slots is not None and slots > 0:
        raise ConfigurationError(
            f"{source}: overlap_degree 0 and slots {slots} exclude each other: no expert may be replicated, "
            f"so the {slots} slots would stay empty; set slots to 0 or overlap_degree to 1 or more"
        )
    if slots == 0 and degree is not None and degree > 0:
        raise ConfigurationError(
            f"{source}: slots 0 and overlap_degree {degree} exclude each other: {degree} experts may be "
            "replicated, but no device has room for a replica; set slots to 1 or more or overlap_degree to 0"
        )
