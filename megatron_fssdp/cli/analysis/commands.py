"""``megatron-fssdp report``, ``compare`` and ``simulate``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from megatron_fssdp.cli.shared_options import Paths, Texts, key_values, run_files, strategy_list
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.shipped_files import known_clusters

_CLUSTER = "YAML of a cluster, or a name that `megatron-fssdp configs` lists."
_OTHER_LOADS = "other loads: Megatron's router traces or tokens per expert, or counts in a .npy or .csv file"

RankingCluster = Annotated[
    str | None,
    typer.Option(help=f"Cluster to rank strategies on: {_CLUSTER}", autocompletion=known_clusters),
]
RankedStrategies = Annotated[
    str, strategy_list("rank", " Only with --cluster. Default: all that place experts.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of tables.")]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _refuse_unranked(strategies: str, cluster: str | None) -> None:
    if strategies and cluster is None:
        raise ConfigurationError(
            f"--strategies {strategies}: nothing is ranked without --cluster; add it, or remove --strategies"
        )


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
    cluster: RankingCluster = None,
    strategies: RankedStrategies = "",
    as_json: AsJson = False,
) -> None:
    """Write an HTML page with the losses, loads, times, placements and memory of a run, or with loads."""
    from megatron_fssdp.records.load_sources import sources_in
    from megatron_fssdp.records.metrics_file import METRICS_FILE

    _refuse_unranked(strategies, cluster)
    is_run = run.name == METRICS_FILE or (run / METRICS_FILE).exists() or not sources_in(run)
    folder = run.parent if is_run and run.is_file() else run
    # The page of a run is beside its loads.npy.
    page = out or (run.with_suffix(".html") if folder.is_file() else folder / "report.html")
    if is_run:
        if model or settings:
            raise ConfigurationError(
                f"--model: got {run}, which describes its model, wanted other loads; remove it"
            )
        _write_report([run], page, cluster, strategies, as_json=as_json, loads_only=False)
    else:
        _write_loads_report(str(run), page, model, settings or (), cluster, strategies, as_json=as_json)


def _write_loads_report(
    source: str,
    page: Path,
    model: Paths,
    changes: Sequence[str],
    cluster: str | None,
    strategies: str,
    *,
    as_json: bool,
) -> None:
    """Write the page of loads that no run of this package recorded, and print their figures."""
    from pydantic_core import to_json
    from rich.console import Console

    from megatron_fssdp.cli.analysis import strategy_ranking as ranking
    from megatron_fssdp.cli.analysis.what_if import ranked_settings, ranking_of_loads
    from megatron_fssdp.config.run.composition import load_run
    from megatron_fssdp.files.written_files import refuse_special_file, refuse_unwritable
    from megatron_fssdp.report.simulations.loads_page import loads_page
    from megatron_fssdp.report.simulations.simulation_report import ranking_data
    from megatron_fssdp.simulation.moe_job import job_of_run

    refuse_special_file(page, "--out")
    refuse_unwritable(page, "--out")
    config = load_run(model or ranking.recorded_settings(source), changes)
    console, name = Console(markup=False, stderr=as_json), Path(source).resolve().name
    record, note = ranking.loads_with_progress(source, job_of_run(config), console)
    simulated = None
    if cluster is not None:
        with console.status("simulating"):
            chosen = ranked_settings(config, _names(strategies))
            simulated = ranking_of_loads(record, note, name, "", cluster, config, chosen)
    made = loads_page(name, record.of_whole_iterations(), note, simulated)
    made.write(page)
    if as_json:
        data = {
            "sentence": made.sentence,
            "page": str(page),
            "simulation": simulated and ranking_data(simulated),
        }
        print(to_json(data, indent=2, inf_nan_mode="null").decode())
        return
    words = f"wrote {page}; open it in a browser (it works without a network)"
    for line in filter(None, (made.sentence, note, words)):
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)


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
    if len(runs) < 2:
        raise ConfigurationError(
            "compare: got one run, wanted two or more; `megatron-fssdp report RUN_DIR` shows a single one"
        )
    _refuse_unranked(strategies, cluster)
    page = out or runs[0] / "comparison.html"
    _write_report(runs, page, cluster, strategies, as_json=as_json, loads_only=loads_only)


def _write_report(
    paths: list[Path], page: Path, cluster: str | None, strategies: str, *, as_json: bool, loads_only: bool
) -> None:
    """Write the page of one run, or of several that are compared with the first, and print the figures."""
    from pydantic_core import to_json
    from rich.console import Console

    from megatron_fssdp.cli.analysis.what_if import what_if
    from megatron_fssdp.files.written_files import refuse_special_file, refuse_unwritable
    from megatron_fssdp.records.run_settings import differing_settings, loss_obstacle
    from megatron_fssdp.report.simulations.simulation_report import ranking_data
    from megatron_fssdp.report.tables import terminal_table
    from megatron_fssdp.report.trainings.measures import comparison_table, largest_difference, measures_of
    from megatron_fssdp.report.trainings.run_page import run_page, settings_table
    from megatron_fssdp.report.trainings.shown_run import not_comparable, shown_runs

    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigurationError("compare: got the same run twice, wanted different runs; give each one once")
    refuse_special_file(page, "--out")
    runs, console = shown_runs(paths), Console(markup=False)
    refuse_unwritable(page, "--out")
    settings = [shown.run.settings for shown in runs]
    obstacle = loss_obstacle(settings)
    if obstacle and not loads_only:
        raise ConfigurationError(
            f"compare: the losses of {' and '.join(shown.name for shown in runs)} say nothing of each other, "
            f"because the runs have {obstacle}; add --loads-only to compare everything else"
        )
    with console.status("reading" if cluster is None else "simulating"):
        simulated = what_if(runs, cluster, _names(strategies))
        made = run_page(runs, simulated, with_losses=not loads_only)
        made.write(page)
    reason = not_comparable(runs)
    if as_json:
        rows = []
        for shown in runs:
            figures = {measure.key: measure.value for measure in measures_of(shown.run)}
            if not loads_only and shown is not runs[0]:
                figures["largest_loss_difference"] = largest_difference(runs[0].run, shown.run)
            about = {"name": shown.name, "path": str(shown.run.path), "strategy": shown.run.strategy}
            rows.append({**about, **figures, "problems": shown.run.problems})
        data = {
            "sentence": made.sentence,
            "page": str(page),
            "speed_not_comparable": reason or None,
            "runs": rows,
            "settings_that_differ": differing_settings(settings),
            "simulation": None if simulated is None else ranking_data(simulated),
        }
        print(to_json(data, indent=2, inf_nan_mode="null").decode())
        return
    wraps = console.is_terminal
    problems = [f"{shown.name}: {problem}" for shown in runs for problem in shown.run.problems]
    for line in (made.sentence, *problems):
        console.print(line, highlight=False, soft_wrap=not wraps)
    if (differing := settings_table(runs)).rows:
        console.print(terminal_table(differing, "settings that differ"))
    below = ["load: tokens of the busiest device over those of an average one; 1 is even"]
    below += [reason] if reason else []
    below += [f"simulated, not measured: {simulated.title}"] if simulated is not None else []
    figures_table = comparison_table(runs, with_losses=not loads_only)
    console.print(terminal_table(figures_table, caption="\n".join(below)))
    words = f"wrote {page}; open it in a browser (it works without a network)"
    console.print(words, highlight=False, soft_wrap=not wraps)


def simulate_command(
    loads: Annotated[
        str,
        typer.Option(
            help=f"Folder of a recorded run, a workload (W0 to W7, drift, jump-micro), or {_OTHER_LOADS}."
        ),
    ],
    cluster: Annotated[str, typer.Option(help=_CLUSTER, autocompletion=known_clusters)],
    out: Annotated[Path, typer.Option(help="Folder to write the results to.")],
    model: Annotated[Paths, run_files("the run.", " Default: the recorded run's own settings.")] = None,
    strategies: Annotated[str, strategy_list("simulate")] = "ep,fssdp",
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
    break_even: Annotated[
        bool, typer.Option(help="Find the batch size and bandwidth at which each strategy starts to pay.")
    ] = True,
    plots: Annotated[bool, typer.Option(help="Write the HTML page.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of generated loads.")] = 0,
) -> None:
    """Predict which strategy is fastest on a cluster, from recorded or generated loads."""
    from rich.console import Console

    from megatron_fssdp.cli.analysis import strategy_ranking as ranking
    from megatron_fssdp.config.cluster_description import cluster_yaml
    from megatron_fssdp.config.run.composition import load_run
    from megatron_fssdp.files.written_files import refuse_foreign, refuse_unwritable, written_whole
    from megatron_fssdp.report.simulations import simulation_page as pages
    from megatron_fssdp.report.simulations.simulated_loads import simulated_stage
    from megatron_fssdp.report.simulations.simulation_report import write_report
    from megatron_fssdp.simulation.moe_job import job_of_run

    refuse_unwritable(out, "--out")
    names, models = _names(strategies), model or ranking.recorded_settings(loads)
    if not names:
        raise ConfigurationError(
            "--strategies: got no name; give names separated by commas, such as ep,fssdp"
        )
    run = load_run(models, settings or ())
    described = ranking.described_cluster(cluster, cluster_set or ())
    chosen = {name: ranking.settings_of(name, run, moe_strategy_set or ()) for name in names}
    ranking.refuse_unknown_keys(moe_strategy_set or (), chosen)
    console = Console(markup=False)
    record, note = ranking.loads_with_progress(loads, job_of_run(run), console, slice(iterations), seed)
    job, record, links, words = simulated_stage(run, record, described, stage)
    note, count = "; ".join(filter(None, (note, words))), len(record.iterations)
    title = f"{loads} on {described.name}: {count} iterations, {' + '.join(path.name for path in models)}"
    wraps = console.is_terminal  # a log keeps each sentence on one line, so that a search finds it
    header, file = "Written by megatron-fssdp simulate.", out / "cluster.yaml"
    if file.exists() and Path(cluster).exists() and file.samefile(cluster):
        raise ConfigurationError(
            f"--out {out}: the cluster of the results would replace --cluster {cluster}; give another folder"
        )
    with written_whole(out, "--out") as partial:
        refuse_foreign(file, "--out", f"# {header}".encode())
        report = ranking.ranked_strategies(
            *(title, record, links, job, chosen), note=note, with_break_even=break_even, console=console
        )
        console.print(pages.simulation_headline(report), highlight=False, soft_wrap=not wraps)
        console.print("", *report.terminal_tables(), sep="\n")
        for line in report.notes:
            console.print(f"• {line}", highlight=False, soft_wrap=not wraps)
        write_report(report, partial)
        (partial / file.name).write_text(cluster_yaml(described, header), encoding="utf-8")
    page = ""
    if plots:  # a page that fails does not cost the numbers
        pages.simulation_page(report, record, described, job).write(out / pages.PAGE_FILE)
        page = f"{out / pages.PAGE_FILE} (open it in a browser), "
    console.print(f"wrote {page}tables to {out}", highlight=False, soft_wrap=True)
