"""What a simulation starts from: a described cluster, settings of strategies, the model of a recorded run."""

from collections.abc import Sequence
from pathlib import Path

from megatron_fssdp.config.cluster_description import ClusterDescription, load_cluster
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import apply_overrides, validate
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.strategy.strategy_registry import strategy_settings
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings
from megatron_fssdp.records.run_settings import SETTINGS_FILE
from megatron_fssdp.report.simulations.simulated_loads import unknown_loads
from megatron_fssdp.simulation.workloads import WORKLOADS


def recorded_settings(loads: str) -> list[Path]:
    """Return the ``config.yaml`` of the recorded run that ``--loads`` names, in the place of ``--model``."""
    path = Path(loads)
    if loads not in WORKLOADS and not path.exists():
        raise ConfigurationError(unknown_loads(loads))
    file = (path if path.is_dir() else path.parent) / SETTINGS_FILE
    if loads in WORKLOADS or not file.is_file():
        raise ConfigurationError(
            f"--model: --loads {loads} has no {SETTINGS_FILE} that describes the model; name a run's YAML"
        )
    return [file]


def described_cluster(source: str, overrides: Sequence[str] = ()) -> ClusterDescription:
    """Read a cluster by its YAML file or name, with ``key=value`` changes of some of its values."""
    cluster = load_cluster(source)
    if not overrides:
        return cluster
    data = apply_overrides(cluster.model_dump(mode="json", exclude_none=True), overrides, "--cluster-set")
    return validate(ClusterDescription, data, "--cluster-set")


def settings_of(name: str, run: RunConfig, overrides: Sequence[str] = ()) -> StrategySettings:
    """Return a strategy's settings: the run's if it uses this strategy, and the overrides that it knows."""
    data = dict(run.strategy.settings) if run.strategy.name == name else {}
    apply_overrides({}, overrides, "--moe-strategy-set")  # refuses texts that are no settings
    known = set(type(strategy_settings(name, {}, "--strategies")).model_fields)
    known_overrides = [override for override in overrides if override.partition("=")[0].strip() in known]
    return strategy_settings(name, apply_overrides(data, known_overrides), f"--strategies {name}")
