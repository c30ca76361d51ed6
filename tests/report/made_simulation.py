"""A page of a simulation of five strategies on generated loads, at small size."""

from pathlib import Path

from megatron_fssdp.cli.analysis.simulated_loads import loads_for_job
from megatron_fssdp.cli.analysis.strategy_ranking import described_cluster, ranked_strategies, settings_of
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.report.simulation_page import simulation_page
from megatron_fssdp.simulation.moe_job import job_of_run

STRATEGIES = ("ep", "fssdp", "prophet", "fastermoe", "quota")


def made_simulation():
    """The simulation of W3 on four nodes: its results, and the loads, cluster and job that it took."""
    run = load_run([Path("gpt_moe_tiny")], ("training.micro_batch_size=64", "training.global_batch_size=256"))
    cluster, job = described_cluster("hpwnv", ("devices_per_node=2",)), job_of_run(run)
    record, note = loads_for_job("W3", job, slice(12))
    settings = {name: settings_of(name, run) for name in STRATEGIES}
    title = "W3 on hpwnv: 12 iterations, gpt_moe_tiny.yaml"
    return ranked_strategies(title, record, cluster, job, settings, note=note), record, cluster, job


def made_simulation_page(_):
    return simulation_page(*made_simulation())
