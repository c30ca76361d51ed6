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
from megatron_fssdp.records.run_settings import run_config_of
from megatron_fssdp.report.simulations.simulated_loads import loads_for_job
from megatron_fssdp.report.simulations.simulation_report import SimulationReport
from megatron_fssdp.report.trainings.shown_run import ShownRun, not_comparable
from megatron_fssdp.simulation.moe_job import job_of_run

WHAT_IF_ITERATIONS = slice(-60, None)
"""Iterations on which strategies are ranked: the last ones; an untrained router says little."""

_CLUSTER = "h200"
_LARGE_MODEL = ("models/mixtral-8x7b", "parallelism/h200", "training/measure")
"""Layers of a size that is trained on clusters.

Runs whose ranks share cores are small. On a real cluster, start-up times would dominate their layers.
"""


def ranking_on(cluster_name: str, runs: Sequence[ShownRun], strategies: Sequence[str]) -> SimulationReport:
    """Rank strategies on a cluster, with the loads and the model of the first run that has loads.

    Raises:
        ConfigurationError: No run has loads, or run and cluster do not fit together.
    """
    one = next((one for one in runs if one.run.loads is not None), None)
    if one is None:
        raise ConfigurationError(
            "--cluster: strategies are ranked on recorded loads, but no run has recorded loads; run one "
            "again with --moe-strategy ep, or remove --cluster"
        )
    config, cluster = run_config_of(one.run.path), described_cluster(cluster_name)
    job = job_of_run(config)
    names = strategies or [name for name, entry in STRATEGIES.items() if entry.is_ranked]
    record, note = loads_for_job(str(one.run.path), job, WHAT_IF_ITERATIONS)
    numbers = f"iterations {record.iterations[0]} to {record.iterations[-1]}"
    title = f"Loads of {one.name}, {numbers}, on {cluster.name}"
    settings = {name: settings_of(name, config) for name in names}
    report = ranked_strategies(title, record, cluster, job, settings, note=note)
    return replace(report, of_own_model=True)


def cost_on_a_cluster(runs: Sequence[ShownRun]) -> SimulationReport | None:
    """Simulate what the loads of runs would cost in large layers, if their own speed says nothing.

    The layers have the sizes of Mixtral 8x7B's, with the experts and devices of the runs. Only plain expert
    parallelism and the strategies of the runs are simulated, with default settings.

    Returns:
        The results; None if the speed of the runs may be compared, or if their loads do not fit.
    """
    one = next((one for one in runs if one.run.loads is not None), None)
    if one is None or one.run.loads is None or not not_comparable([one.run for one in runs]):
        return None
    _, num_layers, num_devices, num_experts = one.run.loads.counts_ILDE.shape
    known = (name for name in (BASELINE, *(one.run.strategy for one in runs)) if name in STRATEGIES)
    ranked = [name for name in known if STRATEGIES[name].is_ranked]
    try:
        settings = {name: strategy_settings(name, {}, "defaults") for name in ranked}
        config = load_run(
            [Path(part) for part in _LARGE_MODEL],
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
        job, cluster = job_of_run(config), described_cluster(_CLUSTER)
        record, note = loads_for_job(str(one.run.path), job, WHAT_IF_ITERATIONS)
        title = f"the loads of {one.name} in {num_layers} layers of Mixtral 8x7B's size on {num_devices} H200"
        return ranked_strategies(title, record, cluster, job, settings, note=note)
    except ConfigurationError:  # this section is an extra; experts or devices of the runs can be unusual
        return None
