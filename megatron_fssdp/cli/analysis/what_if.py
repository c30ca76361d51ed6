"""Simulates the recorded loads of a page's runs on a described cluster."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_fssdp.cli.analysis.simulation_inputs import described_cluster, settings_of
from megatron_fssdp.cli.analysis.strategy_ranking import ranked_strategies
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.strategy.strategy_registry import BASELINE, STRATEGIES
from megatron_fssdp.config.strategy.strategy_selection import strategy_settings
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings
from megatron_fssdp.reporting.page.reported_run import ReportedRun
from megatron_fssdp.reporting.records.arrays.load_records import RecordedLoads
from megatron_fssdp.reporting.records.job_records import loads_for_job
from megatron_fssdp.reporting.records.recorded_run import run_config_of
from megatron_fssdp.reporting.records.run_parts import not_comparable
from megatron_fssdp.reporting.simulation_report import SimulationReport
from megatron_fssdp.simulation.moe_job import MoeJob, job_of_run

WHAT_IF_ITERATIONS = 60
"""Number of recorded iterations, from the end, on which strategies are ranked.

Loads of an untrained router say little, and every strategy has to plan each iteration.
"""

DESCRIBED_CLUSTER = "h200"
LARGE_MODEL = ("models/mixtral-8x7b", "parallelism/h200", "training/measure")
"""Cluster and layers on which loads are simulated if the speed of their runs says nothing.

Runs whose ranks share cores are small. On a real cluster, start-up times would dominate the times of such
layers. So their loads are put into layers of a size that is trained on clusters.
"""


def ranking_on(cluster_name: str, runs: Sequence[ReportedRun], strategies: Sequence[str]) -> SimulationReport:
    """Rank strategies on a cluster, with the loads and the model of the first run that has loads.

    Args:
        cluster_name: YAML file or name of the cluster.
        runs: Runs of the page.
        strategies: Names of the strategies.

    Raises:
        ConfigurationError: No run has loads, or run and cluster do not fit together.
    """
    run = _with_loads(runs)
    if run is None:
        raise ConfigurationError(
            "--cluster: strategies are ranked on recorded loads, but no run has recorded loads; run one "
            "again with --moe-strategy ep, or remove --cluster"
        )
    config, cluster = run_config_of(run.records.path), described_cluster(cluster_name)
    job = job_of_run(config)
    settings = {name: settings_of(name, config) for name in strategies}
    record, note = _last_loads(run, job)
    first_number, last_number = record.iterations[0], record.iterations[-1]
    title = f"Loads of {run.name}, iterations {first_number} to {last_number}, on {cluster.name}"
    report = ranked_strategies(title, record, cluster, job, settings, note=note)
    return replace(report, of_own_model=True)


def cost_on_a_cluster(runs: Sequence[ReportedRun]) -> SimulationReport | None:
    """Simulate what the loads of runs would cost in large layers, if their own speed says nothing.

    The layers have the sizes of Mixtral 8x7B's, with the experts and devices of the runs. Only plain expert
    parallelism and the strategies of the runs are simulated, with default settings.

    Args:
        runs: Runs of the page.

    Returns:
        The results; None if the speed of the runs may be compared, or if their loads do not fit.
    """
    run = _with_loads(runs)
    if run is None or not not_comparable([one.records for one in runs]):
        return None
    try:
        return _in_large_layers(run, _settings_of_runs(runs))
    except ConfigurationError:  # this section is an extra; experts or devices of the runs can be unusual
        return None


def _in_large_layers(run: ReportedRun, settings: dict[str, StrategySettings]) -> SimulationReport:
    assert run.loads is not None
    _, num_layers, num_devices, num_experts = run.loads.counts_ILDE.shape
    config = load_run(
        [Path(part) for part in LARGE_MODEL],
        (
            f"model.num_layers={num_layers}",
            f"model.num_experts={num_experts}",
            f"parallelism.expert_model_parallel_size={num_devices}",
            f"parallelism.nproc_per_node={num_devices}",
            "parallelism.num_nodes=1",
            "training.micro_batch_size=1",
            f"training.global_batch_size={num_devices}",
        ),
    )
    job, cluster = job_of_run(config), described_cluster(DESCRIBED_CLUSTER)
    record, note = _last_loads(run, job)
    title = f"the loads of {run.name} in {num_layers} layers of Mixtral 8x7B's size on {num_devices} H200"
    return ranked_strategies(title, record, cluster, job, settings, note=note)


def _settings_of_runs(runs: Sequence[ReportedRun]) -> dict[str, StrategySettings]:
    """Return the default settings of the strategies to simulate, by name."""
    names = [BASELINE, *(run.records.strategy for run in runs)]
    known = [name for name in dict.fromkeys(names) if name in STRATEGIES and STRATEGIES[name].is_ranked]
    return {name: strategy_settings(name, {}, "defaults") for name in known}


def _with_loads(runs: Sequence[ReportedRun]) -> ReportedRun | None:
    return next((run for run in runs if run.loads is not None), None)


def _last_loads(run: ReportedRun, job: MoeJob) -> tuple[RecordedLoads, str]:
    record, note = loads_for_job(str(run.records.path), job)
    first = max(0, len(record.iterations) - WHAT_IF_ITERATIONS)
    counts, iterations = record.counts_ILDE[first:], record.iterations[first:]
    return replace(record, counts_ILDE=counts, iterations=iterations), note
