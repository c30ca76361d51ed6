"""``megatron-fssdp roofline``: draws the DDL-Roofline of a recorded run (FasterMoE, §3.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from megatron_fssdp.cli.analysis.simulation_inputs import described_cluster, settings_of
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.written_files import written_whole
from megatron_fssdp.reporting.records.job_records import loads_for_job, with_recorded_choices
from megatron_fssdp.reporting.records.recorded_run import run_config_of
from megatron_fssdp.reporting.roofline_plot import Roofline, draw_roofline, roofline_table, write_roofline
from megatron_fssdp.simulation.moe_job import job_of_run
from megatron_fssdp.simulation.roofline import roofline_point
from megatron_fssdp.simulation.simulator import simulate

NAME = "roofline"


@dataclass(frozen=True)
class RooflineRequest:
    """Options of ``megatron-fssdp roofline``.

    Attributes:
        run: Output folder of a recorded run.
        cluster: YAML file or name of a cluster.
        strategies: Names of the strategies to draw. Empty means ``ep`` and the run's own strategy.
        out: Folder to write the results to, or None for the run's folder.
        cluster_overrides: ``key=value`` changes of the cluster.
        strategy_overrides: ``key=value`` settings for all strategies that have the key.
    """

    run: Path
    cluster: str
    strategies: Sequence[str] = ()
    out: Path | None = None
    cluster_overrides: Sequence[str] = ()
    strategy_overrides: Sequence[str] = ()


def run_roofline(request: RooflineRequest, console: Console) -> Roofline:
    """Compute the points of the roofline, print them, and write the files.

    Raises:
        ConfigurationError: A file or name does not exist, or run, cluster and strategies do not fit together.
    """
    run = run_config_of(request.run)
    cluster, job = described_cluster(request.cluster, request.cluster_overrides), job_of_run(run)
    own = run.strategy.name if run.strategy.name != "none" else "ep"
    names = tuple(dict.fromkeys(request.strategies or ("ep", own)))
    settings = {name: settings_of(name, run, request.strategy_overrides) for name in names}
    record, _ = loads_for_job(str(request.run), job)
    try:
        job, _ = with_recorded_choices(job, record, cluster)
        points = {
            name: roofline_point(
                simulate(name, given, record.counts_ILDE, cluster, job, layer_numbers=record.layers.tolist()),
                job,
            )
            for name, given in settings.items()
        }
    except ValueError as error:
        raise ConfigurationError(f"roofline: {error}") from None
    title = f"MoE layers of {request.run.resolve().name} on {cluster.name}, simulated"
    roofline = Roofline(title, cluster.expert_flops_per_s, points)
    console.print(roofline_table(roofline))
    out = request.out or request.run
    with written_whole(out, "--out") as partial:
        write_roofline(roofline, partial / f"{NAME}.json")
    with written_whole(out, "--out") as partial:  # a plot that fails does not cost the numbers
        for suffix in ("png", "svg"):
            draw_roofline(roofline, partial / f"{NAME}.{suffix}")
    console.print(f"{out / NAME}.png, .svg and .json", highlight=False, soft_wrap=True)
    return roofline
