"""``megatron-fssdp roofline``: draws the DDL-Roofline of a recorded run (FasterMoE, §3.3)."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_fssdp.cli.analysis.simulation_inputs import described_cluster, settings_of
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.written_files import written_whole
from megatron_fssdp.records.run_settings import run_config_of
from megatron_fssdp.report.simulations.roofline import (
    LEGEND,
    Roofline,
    roofline_page,
    roofline_table,
    write_roofline,
)
from megatron_fssdp.report.simulations.simulated_loads import loads_for_job, with_recorded_choices
from megatron_fssdp.report.tables import terminal_table
from megatron_fssdp.simulation.moe_job import job_of_run
from megatron_fssdp.simulation.roofline import roofline_point
from megatron_fssdp.simulation.simulator import simulate

NAME = "roofline"


def run_roofline(
    path: Path,
    cluster_name: str,
    console: Console,
    *,
    strategies: Sequence[str] = (),
    out: Path | None = None,
    cluster_overrides: Sequence[str] = (),
    strategy_overrides: Sequence[str] = (),
) -> Roofline:
    """Compute the points of the roofline, print them, and write the page and the numbers.

    The arguments are the command's options. Without strategies, ``ep`` and the run's own one are drawn.

    Raises:
        ConfigurationError: A file or name does not exist, or run, cluster and strategies do not fit together.
    """
    run = run_config_of(path)
    cluster, job = described_cluster(cluster_name, cluster_overrides), job_of_run(run)
    own = run.strategy.name if run.strategy.name != "none" else "ep"
    names = dict.fromkeys(strategies or ("ep", own))
    settings = {name: settings_of(name, run, strategy_overrides) for name in names}
    record, _ = loads_for_job(str(path), job)
    try:
        job, _ = with_recorded_choices(job, record, cluster)
        layers = record.layers.tolist()
        points = {
            name: roofline_point(
                simulate(name, given, record.counts_ILDE, cluster, job, layer_numbers=layers), job
            )
            for name, given in settings.items()
        }
    except ValueError as error:
        raise ConfigurationError(f"roofline: {error}") from None
    title = f"MoE layers of {path.resolve().name} on {cluster.name}, simulated"
    roofline = Roofline(title, cluster.expert_flops_per_s, points)
    console.print(terminal_table(roofline_table(roofline), title, LEGEND))
    folder = out or path
    with written_whole(folder, "--out") as partial:
        write_roofline(roofline, partial / f"{NAME}.json")
    roofline_page(roofline).write(folder / f"{NAME}.html")
    console.print(f"{folder / NAME}.html and .json", highlight=False, soft_wrap=True)
    return roofline
