"""Simulates the recorded loads of a page's runs on a described cluster."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_fssdp.cli.analysis.strategy_ranking import described_cluster, ranked_strategies, settings_of
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.strategy.strategy_registry import BASELINE, STRATEGIES, strategy_settings
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings
from megatron_fssdp.records.loads import RecordedLoads
from megatron_fssdp.records.run_settings import run_config_of
from megatron_fssdp.report.simulations.simulated_loads import loads_for_job, simulated_stage
from megatron_fssdp.report.simulations.simulation_report import SimulationReport
from megatron_fssdp.report.trainings.shown_run import ShownRun, not_comparable
from megatron_fssdp.simulation.moe_job import job_of_run

_ITERATIONS = slice(-60, None)
"""Iterations on which strategies are ranked: the last ones; an untrained router says little."""

_CLUSTER = "h200"
_LARGE_MODEL = ("models/mixtral-8x7b", "parallelism/h200", "training/measure")
"""Layers of a size that is trained on clusters. On these, start-up times would dominate small layers."""


def what_if(
    runs: Sequence[ShownRun], cluster: str | None = None, strategies: Sequence[str] = ()
) -> SimulationReport | None:
    """Rank strategies on a cluster, with the loads of the first run that has loads.

    Without a cluster, runs whose ranks share cores are ranked in large layers, because their speed says
    nothing: layers of Mixtral 8x7B, with the experts and devices of the runs, under plain expert parallelism
    and the strategies of the runs. None for other runs, and for loads that do not fit these layers.

    Raises:
        ConfigurationError: No run has loads, or run and cluster do not fit together.
    """
    measured = next((shown for shown in runs if shown.run.loads is not None), None)
    if cluster is not None:
        if measured is None:
            raise ConfigurationError(
                "--cluster: strategies are ranked on recorded loads, but no run has recorded loads; run one "
                "again with experts and record_dir, or remove --cluster"
            )
        config = run_config_of(measured.run.path)
        return _ranking(measured, "", cluster, config, ranked_settings(config, strategies))
    if measured is None or measured.run.loads is None or not not_comparable(runs):
        return None
    _, num_layers, num_devices, num_experts = measured.run.loads.counts_ILDE.shape
    known = (name for name in (BASELINE, *(shown.run.strategy for shown in runs)) if name in STRATEGIES)
    sizes = (
        f"model.num_layers={num_layers}",
        f"model.num_experts={num_experts}",
        f"parallelism.expert_model_parallel_size={num_devices}",
        f"parallelism.nproc_per_node={num_devices}",
        "parallelism.num_nodes=1",
        "training.micro_batch_size=1",
        f"training.global_batch_size={num_devices}",
    )
    try:
        settings = {
            name: strategy_settings(name, {}, "defaults") for name in known if STRATEGIES[name].is_ranked
        }
        config = load_run([Path(part) for part in _LARGE_MODEL], sizes)
        where = f" in {num_layers} layers of Mixtral 8x7B's size"
        return _ranking(measured, where, _CLUSTER, config, settings)
    except ConfigurationError:  # this section is an extra; experts or devices of the runs can be unusual
        return None


def ranked_settings(config: RunConfig, strategies: Sequence[str]) -> dict[str, StrategySettings]:
    """Return the settings of the named strategies, or of all that are ranked, in a run."""
    names = strategies or [name for name, entry in STRATEGIES.items() if entry.is_ranked]
    return {name: settings_of(name, config) for name in names}


def _ranking(
    one: ShownRun, where: str, cluster_name: str, config: RunConfig, settings: Mapping[str, StrategySettings]
) -> SimulationReport:
    record, note = loads_for_job(str(one.run.path), job_of_run(config), _ITERATIONS)
    return ranking_of_loads(record, note, one.name, where, cluster_name, config, settings)


def ranking_of_loads(
    record: RecordedLoads,
    note: str,
    name: str,
    where: str,
    cluster_name: str,
    config: RunConfig,
    settings: Mapping[str, StrategySettings],
) -> SimulationReport:
    """Rank strategies on the last loads of a record that fits the run's model."""
    last, cluster = record.of_iterations(_ITERATIONS), described_cluster(cluster_name)
    job, last, links, words = simulated_stage(config, last, cluster)
    note = "; ".join(filter(None, (note, words)))
    numbers = f"iterations {last.iterations[0]} to {last.iterations[-1]}"
    title = f"loads of {name}, {numbers},{where} on {job.num_devices} devices of {cluster.name}"
    return ranked_strategies(title, last, links, job, settings, note=note)
