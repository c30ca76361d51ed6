"""``megatron-fssdp report``, ``compare`` and ``simulate``."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_fssdp.cli.shared_options import (
    SHIPPED_NAMES,
    SYSTEM_NAMES,
    Paths,
    Texts,
    key_values,
    plain_console,
    run_files,
    simulated_names,
)
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.shipped_files import known_clusters

_CLUSTER = "YAML of a cluster, or a name that `megatron-fssdp configs` lists."
_OTHER_LOADS = (
    "other loads: Megatron's router traces or tokens per expert, or counts in a .npy, .npz or .csv file"
)

AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of tables.")]


def report_command(
    run: Annotated[
        Path, typer.Argument(help=f"Output folder of a run, or {_OTHER_LOADS}.", metavar="RUN_DIR")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="HTML file to write. Default: report.html in the folder, or FILE.html beside a file."
        ),
    ] = None,
    model: Annotated[
        Paths, run_files("the run that was traced.", " Only for loads that are not of a run.")
    ] = None,
    settings: Annotated[Texts, key_values("Any setting of this run.", "--set")] = None,
    as_json: AsJson = False,
) -> None:
    """Write an HTML page with the losses, loads, times, placements and memory of a run, or with loads."""
    from megatron_fssdp.cli.analysis.page_files import write_loads_page, write_run_page
    from megatron_fssdp.records.load_sources import sources_in
    from megatron_fssdp.records.metrics import METRICS_FILE

    is_run = run.name == METRICS_FILE or (run / METRICS_FILE).exists()
    if not is_run and not sources_in(run):
        problem = "has no records" if run.exists() else "no such file or folder"
        raise ConfigurationError(f"{run}: {problem}; give the folder of a recorded run, or {_OTHER_LOADS}")
    folder = run.parent if is_run and run.is_file() else run
    # The page of a run is beside its loads.npy.
    page = out or (run.with_suffix(".html") if folder.is_file() else folder / "report.html")
    if not is_run:
        write_loads_page(str(run), page, model, settings or (), as_json=as_json)
    elif model or settings:
        raise ConfigurationError(
            f"{'--model' if model else '--set'}: got {run}, which describes its model, wanted other loads; "
            "remove it"
        )
    else:
        write_run_page([run], page, as_json=as_json)


def compare_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Output folders of two or more runs.", metavar="RUN_DIR...")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file to write. Default: comparison.html in the first run's folder."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the losses, device loads, speed and moved bytes of runs in a table and an HTML page."""
    from megatron_fssdp.cli.analysis.page_files import write_run_page

    if len(runs) < 2:
        raise ConfigurationError(
            "compare: got one run, wanted two or more; `megatron-fssdp report RUN_DIR` shows a single one"
        )
    write_run_page(runs, out or runs[0] / "comparison.html", as_json=as_json)


def simulate_command(
    loads: Annotated[
        str,
        typer.Option(
            help="Folder of a recorded run, a workload (W0 to W7, lognormal-weak, -medium or -strong, drift, "
            f"jump-micro), or {_OTHER_LOADS}."
        ),
    ],
    cluster: Annotated[str, typer.Option(help=_CLUSTER, autocompletion=known_clusters)],
    out: Annotated[Path, typer.Option(help="Folder to write the results to.")],
    model: Annotated[Paths, run_files("the run.", " Default: the recorded run's own settings.")] = None,
    strategies: Annotated[
        str,
        typer.Option(
            help=f"Strategies to simulate, separated by commas, of {SHIPPED_NAMES}, and systems of others: "
            f"{SYSTEM_NAMES}.",
            autocompletion=simulated_names,
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
    settings: Annotated[Texts, key_values("Any setting of the run.", "--set")] = None,
    stage: Annotated[
        int | None, typer.Option(min=0, help="Pipeline stage to simulate, from 0. Default: the slowest.")
    ] = None,
    cluster_set: Annotated[Texts, key_values("A value of the cluster.")] = None,
    moe_strategy_set: Annotated[Texts, key_values("A setting for all strategies that have this key.")] = None,
    plots: Annotated[bool, typer.Option(help="Write the HTML page.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of generated loads.")] = 0,
) -> None:
    """Predict which strategy is fastest on a cluster, from recorded or generated loads."""
    from megatron_fssdp.cli.analysis import strategy_ranking as ranking
    from megatron_fssdp.cli.analysis.page_files import print_lines
    from megatron_fssdp.cli.analysis.simulated_loads import loads_for_job, simulated_stage
    from megatron_fssdp.config.cluster_description import cluster_yaml
    from megatron_fssdp.config.run.composition import load_run
    from megatron_fssdp.files.written_files import refuse_foreign, refuse_unwritable, written_whole
    from megatron_fssdp.report import simulation_page as pages
    from megatron_fssdp.report.simulation_report import write_report
    from megatron_fssdp.simulation.moe_job import job_of_run

    refuse_unwritable(out, "--out")
    names = [name.strip() for name in strategies.split(",") if name.strip()]
    models = model or ranking.recorded_settings(loads)
    if not names:
        raise ConfigurationError(
            "--strategies: got no name; give names separated by commas, such as ep,fssdp"
        )
    run = load_run(models, settings or ())
    described = ranking.described_cluster(cluster, cluster_set or ())
    chosen = {name: ranking.settings_of(name, run, moe_strategy_set or ()) for name in names}
    ranking.refuse_unknown_keys(moe_strategy_set or (), chosen)
    console = plain_console()
    with console.status(f"reading {loads}"):
        record, note = loads_for_job(loads, job_of_run(run), slice(iterations), seed)
    job, record, links, words = simulated_stage(run, record, described, stage)
    note, count = "; ".join(filter(None, (note, words))), len(record.iterations)
    title = f"{loads} on {described.name}: {count} iterations, {' + '.join(path.name for path in models)}"
    header, file = "Written by megatron-fssdp simulate.", out / "cluster.yaml"
    if file.exists() and Path(cluster).exists() and file.samefile(cluster):
        raise ConfigurationError(
            f"--out {out}: the cluster of the results would replace --cluster {cluster}; give another folder"
        )
    with written_whole(out, "--out") as partial:
        refuse_foreign(file, "--out", f"# {header}".encode())
        report = ranking.ranked_strategies(title, record, links, job, chosen, note=note, console=console)
        headline, notes = pages.simulation_headline(report), [f"• {note}" for note in report.notes]
        print_lines(console, headline, *report.terminal_tables(), *notes)
        write_report(report, partial)
        (partial / file.name).write_text(cluster_yaml(described, header), encoding="utf-8")
    page = ""
    if plots:  # a page that fails does not cost the numbers
        pages.simulation_page(report, record, described, job).write(out / pages.PAGE_FILE)
        page = f"{out / pages.PAGE_FILE} (open it in a browser), "
    console.print(f"wrote {page}tables to {out}")
