"""``megatron-fssdp report``, ``compare`` and ``simulate``."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_fssdp.cli.completed_names import SHIPPED_NAMES, strategy_names
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.shipped_files import known_clusters, shipped_runs

_CLUSTER = "YAML of a cluster, or a name that `megatron-fssdp configs` lists."

RankingCluster = Annotated[
    str | None,
    typer.Option(help=f"Cluster to rank strategies on: {_CLUSTER}", autocompletion=known_clusters),
]
RankedStrategies = Annotated[
    str,
    typer.Option(
        help=f"Strategies to rank, separated by commas, of {SHIPPED_NAMES}. Default: all that place experts.",
        autocompletion=strategy_names,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of tables.")]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def report_command(
    run: Annotated[Path, typer.Argument(help="Output folder of a run.", metavar="RUN_DIR")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write. Default: report.html in the run's folder.")
    ] = None,
    cluster: RankingCluster = None,
    strategies: RankedStrategies = "",
    as_json: AsJson = False,
) -> None:
    """Write an HTML page with the losses, loads, times, placements and memory of a run."""
    from megatron_fssdp.cli.analysis.report_command import write_report

    write_report([run], out or run / "report.html", cluster, _names(strategies), as_json=as_json)


def compare_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Output folders of two or more runs.", metavar="RUN_DIR...")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file to write. Default: comparison.html in the first run's folder."),
    ] = None,
    loads_only: Annotated[
        bool,
        typer.Option(
            "--loads-only", help="Compare runs without their losses. Needed if they train different things."
        ),
    ] = False,
    cluster: RankingCluster = None,
    strategies: RankedStrategies = "",
    as_json: AsJson = False,
) -> None:
    """Compare the losses, device loads, speed and moved bytes of runs in a table and an HTML page."""
    from megatron_fssdp.cli.analysis.report_command import write_report

    if len(runs) < 2:
        raise ConfigurationError(
            "compare: got one run, wanted two or more; `megatron-fssdp report RUN_DIR` shows a single one"
        )
    page = out or runs[0] / "comparison.html"
    write_report(runs, page, cluster, _names(strategies), loads_only=loads_only, as_json=as_json)


def simulate_command(
    loads: Annotated[
        str,
        typer.Option(help="Folder of a recorded run, its loads.npy, or the name of a workload (W0 to W7)."),
    ],
    cluster: Annotated[str, typer.Option(help=_CLUSTER, autocompletion=known_clusters)],
    out: Annotated[Path, typer.Option(help="Folder to write the results to.")],
    model: Annotated[
        list[Path] | None,
        typer.Option(
            help="YAML of the run. Repeatable for parts of a run. Default: the recorded run's own settings.",
            metavar="RUN.yaml",
            autocompletion=shipped_runs,
        ),
    ] = None,
    strategies: Annotated[
        str,
        typer.Option(
            help=f"Strategies to simulate, separated by commas, of {SHIPPED_NAMES}.",
            autocompletion=strategy_names,
        ),
    ] = "ep,fssdp",
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100_000,
            help="Number of iterations to generate (default 20) or to use of a record (default all).",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the run. Repeatable."),
    ] = None,
    cluster_set: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A value of the cluster. Repeatable.")
    ] = None,
    moe_strategy_set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="A setting for all strategies that have this key. Repeatable."
        ),
    ] = None,
    break_even: Annotated[
        bool, typer.Option(help="Find the batch size and bandwidth at which each strategy starts to pay.")
    ] = True,
    plots: Annotated[bool, typer.Option(help="Write the HTML page.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of generated loads.")] = 0,
) -> None:
    """Predict which strategy is fastest on a cluster, from recorded or generated loads."""
    from rich.console import Console

    from megatron_fssdp.cli.analysis.simulation_inputs import (
        described_cluster,
        recorded_settings,
        settings_of,
    )
    from megatron_fssdp.cli.analysis.strategy_ranking import ranked_strategies
    from megatron_fssdp.config.cluster_files import cluster_yaml
    from megatron_fssdp.config.run.composition import load_run
    from megatron_fssdp.config.written_files import refuse_foreign, refuse_unwritable, written_whole
    from megatron_fssdp.report.simulations.simulated_loads import loads_for_job
    from megatron_fssdp.report.simulations.simulation_page import (
        PAGE_FILE,
        simulation_headline,
        simulation_page,
    )
    from megatron_fssdp.report.simulations.simulation_report import write_report
    from megatron_fssdp.simulation.moe_job import job_of_run

    refuse_unwritable(out, "--out")
    names, models = _names(strategies), model or recorded_settings(loads)
    if not names:
        raise ConfigurationError(
            "--strategies: got no name; give names separated by commas, such as ep,fssdp"
        )
    run = load_run(models, settings or ())
    job, described = job_of_run(run), described_cluster(cluster, cluster_set or ())
    chosen = {name: settings_of(name, run, moe_strategy_set or ()) for name in names}
    record, note = loads_for_job(loads, job, slice(iterations), seed)
    count = len(record.iterations)
    title = f"{loads} on {described.name}: {count} iterations, {' + '.join(path.name for path in models)}"
    console = Console(markup=False)
    wraps = console.is_terminal  # a log keeps each sentence on one line, so that a search finds it
    header, file = "Written by megatron-fssdp simulate.", out / "cluster.yaml"
    if file.exists() and Path(cluster).exists() and file.samefile(cluster):
        raise ConfigurationError(
            f"--out {out}: the cluster of the results would replace --cluster {cluster}; give another folder"
        )
    with written_whole(out, "--out") as partial:
        refuse_foreign(file, "--out", f"# {header}".encode())
        report = ranked_strategies(
            *(title, record, described, job, chosen), note=note, with_break_even=break_even, console=console
        )
        console.print(simulation_headline(report), highlight=False, soft_wrap=not wraps)
        console.print("", *report.terminal_tables(), sep="\n")
        for line in report.notes:
            console.print(f"• {line}", highlight=False, soft_wrap=not wraps)
        write_report(report, partial)
        (partial / file.name).write_text(cluster_yaml(described, header), encoding="utf-8")
    page = ""
    if plots:  # a page that fails does not cost the numbers
        simulation_page(report, record, described, job).write(out / PAGE_FILE)
        page = f"{out / PAGE_FILE} (open it in a browser), "
    console.print(f"wrote {page}tables to {out}", highlight=False, soft_wrap=True)
