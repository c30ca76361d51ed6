"""The command line ``megatron-fssdp``.

Heavy packages are imported inside the commands, so that ``--help`` answers quickly.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_fssdp import __version__
from megatron_fssdp.cli.command_classes import MEGATRON_WORDS, NamingCommand, PassingCommand
from megatron_fssdp.config.errors import ConfigurationError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_UsageError: Any = typer.BadParameter.__base__
"""Exception that typer raises for a wrong command line. typer does not export it under a name."""

app = typer.Typer(
    name="megatron-fssdp",
    help="Train Mixture-of-Experts models on stock Megatron-LM with balanced load.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Build training data.", no_args_is_help=True)
app.add_typer(data_app, name="data")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _show_version(asked: bool) -> None:
    if asked:
        print(f"megatron-fssdp {__version__}")
        raise typer.Exit


ClusterName = Annotated[
    str, typer.Option(help="YAML of a cluster, or a name that `megatron-fssdp configs` lists.")
]
ClusterValues = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="A value of the cluster. Repeatable.")
]
StrategySettings = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="A setting for all strategies that have this key. Repeatable."),
]
RankingCluster = Annotated[
    str | None,
    typer.Option(
        help="Cluster to rank strategies on: YAML file, or a name that `megatron-fssdp configs` lists."
    ),
]
RankedStrategies = Annotated[
    str,
    typer.Option(
        help="Strategies to rank, separated by commas, of {strategies}. Default: all that place experts."
    ),
]


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Train Mixture-of-Experts models on stock Megatron-LM with balanced load."""


@app.command("train", cls=PassingCommand, options_metavar="[OPTIONS] [-- MEGATRON ARGUMENTS]")
def train_command(
    context: typer.Context,
    configs: Annotated[
        list[Path],
        typer.Argument(
            help="YAML files of the run, or names that `megatron-fssdp configs` lists. Later files win.",
            metavar="CONFIG.yaml...",
        ),
    ],
    moe_strategy: Annotated[
        str | None, typer.Option(help="Strategy that replaces the one in the files: {strategies}.")
    ] = None,
    moe_strategy_set: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A setting of the strategy, for example slots=2. Repeatable."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any setting of the run, for example training.seed=7. Repeatable.",
        ),
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Number of ranks on this machine.")] = None,
    iters: Annotated[
        int | None, typer.Option(help="Number of training iterations. Warm-up ends before the last.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder. Default: a folder in runs/, named after the files.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the torchrun command and start nothing.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in the output folder from its last checkpoint, with its earlier options.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run in the output folder and start a new one.")
    ] = False,
) -> None:
    """Train a model on this machine, or print the command for a cluster.

    Words after -- are passed on to Megatron-LM, for example: -- --moe-grouped-gemm
    """
    from rich.console import Console

    from megatron_fssdp.cli.train_command import dry_run as command_of_run
    from megatron_fssdp.cli.train_command import train
    from megatron_fssdp.cli.train_request import TrainRequest

    request = TrainRequest(
        config_paths=configs,
        strategy=moe_strategy,
        strategy_overrides=moe_strategy_set or (),
        overrides=settings or (),
        nproc=nproc,
        iterations=iters,
        out=out,
        megatron_words=context.meta[MEGATRON_WORDS],
        resume=resume,
        overwrite=overwrite,
    )
    if dry_run:
        print(command_of_run(request))
        return
    raise typer.Exit(train(request, Console(markup=False)))


@app.command("sweep", options_metavar="[OPTIONS]")
def sweep_command(
    sweep: Annotated[Path, typer.Argument(help="YAML file of the sweep.", metavar="SWEEP.yaml")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of all runs and of the page. Default: in runs/, named after the file."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print state and command of every run, and start nothing."),
    ] = False,
) -> None:
    """Train strategies × settings × seeds from one YAML, and compare them on one page with their spread.

    The same command continues an interrupted sweep: finished runs are not run again.
    """
    from rich.console import Console

    from megatron_fssdp.cli.sweep_command import SweepRequest, listing, prepare, run_sweep

    prepared = prepare(SweepRequest(sweep, out))
    if dry_run:
        print(listing(prepared))
        return
    raise typer.Exit(run_sweep(prepared, Console(markup=False)))


@app.command("profile")
def profile_command(
    out: Annotated[Path, typer.Option(help="YAML file to write.", metavar="CLUSTER.yaml")],
    nproc: Annotated[
        int | None, typer.Option(help="Number of ranks to start on this machine. Not under torchrun.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Number of equal nodes, in the order of ranks. Default: torchrun's machines."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="Communication backend, gloo or nccl. Default: nccl if there are CUDA devices."),
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            help="YAML of the run whose layers are measured. Repeatable for parts of a run.",
            metavar="RUN.yaml",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the cluster. Default: the name of the file.")
    ] = None,
    least_bytes: Annotated[int, typer.Option(help="Smallest message, in bytes.")] = 1 << 10,
    most_bytes: Annotated[int, typer.Option(help="Largest message, in bytes.")] = 1 << 24,
    repetitions: Annotated[
        int, typer.Option(help="Number of measurements of each value. Their median counts.")
    ] = 7,
) -> None:
    """Measure links and compute of a cluster, and write its description for simulate and the planners.

    The command measures the ranks that torchrun started. With --nproc it starts ranks on this machine.
    """
    from megatron_fssdp.cli.profile_command import ProfileRequest, profile
    from megatron_fssdp.config.run.composition import load_run
    from megatron_fssdp.megatron_adapter.diagnosis.cluster_profiler import ProfileSettings

    settings = ProfileSettings(
        name=name or out.stem,
        num_nodes=nodes,
        backend=backend,
        model=load_run(model) if model else None,
        least_bytes=least_bytes,
        most_bytes=most_bytes,
        num_repetitions=repetitions,
    )
    raise typer.Exit(profile(ProfileRequest(out, settings, nproc)))


@app.command("doctor")
def doctor_command(
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints. Checks if it is writable and has space.", metavar="DIR"),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            help="YAML of a run. Checks if its ranks and checkpoints fit. Repeatable for parts of a run.",
            metavar="CONFIG.yaml",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check whether a training can run on this machine, and say what to do if it cannot."""
    from megatron_fssdp.cli.doctor_command import DoctorRequest, examine

    raise typer.Exit(examine(DoctorRequest(config or (), checkpoints, as_json)))


@data_app.command("build")
def data_build_command(
    out: Annotated[Path, typer.Option(help="Folder to write the data to.")],
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Text files, JSON lines (.jsonl), and folders of both. "
            "Default: the sources of Python's standard library."
        ),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(
            help="bpe: trained byte-level BPE. bytes: one token per byte. wordpiece: sentences for BERT. "
            "Anything else: a Hugging Face tokenizer, by its name, folder or tokenizer.json."
        ),
    ] = "bpe",
    json_key: Annotated[
        str, typer.Option(help="Key that holds the text in each line of .jsonl and .json files.")
    ] = "text",
    eod_token: Annotated[
        str | None,
        typer.Option(help="Token of a Hugging Face tokenizer that ends a document. Default: its own."),
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size of a trained tokenizer.")] = 4096,
    shards: Annotated[
        int, typer.Option(help="Number of shards. An interrupted build does not repeat finished shards.")
    ] = 4,
    with_tests: Annotated[
        bool, typer.Option("--with-tests", help="Add the standard library's tests to the default text.")
    ] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Replace data that is damaged or was built from other text.")
    ] = False,
) -> None:
    """Tokenize text into Megatron's indexed data. Data that is up to date is not built again."""
    from rich.console import Console

    from megatron_fssdp.cli.data_command import build_with_progress

    console = Console(markup=False)
    build_with_progress(
        *(paths or [], out, tokenizer, vocab_size, shards, rebuild, with_tests, console),
        json_key=json_key,
        eod_token=eod_token,
    )


@app.command("report", cls=NamingCommand)
def report_command(
    run: Annotated[Path, typer.Argument(help="Output folder of a run.", metavar="RUN_DIR")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write. Default: report.html in the run's folder.")
    ] = None,
    cluster: RankingCluster = None,
    strategies: RankedStrategies = "",
) -> None:
    """Write an HTML page with the losses, loads, times, placements and memory of a run."""
    from rich.console import Console

    from megatron_fssdp.cli.report_command import ReportRequest, write_report_page

    request = ReportRequest([run], out, cluster)
    write_report_page(request.with_strategies(_names(strategies)), Console(markup=False))


@app.command("compare", cls=NamingCommand)
def compare_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Output folders of two or more runs.", metavar="RUN_DIR...")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file to write. Default: comparison.html in the first run's folder."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="PNG file to write with a plot of the device loads.")
    ] = None,
    loads_only: Annotated[
        bool,
        typer.Option(
            "--loads-only", help="Compare runs without their losses. Needed if they train different things."
        ),
    ] = False,
    cluster: RankingCluster = None,
    strategies: RankedStrategies = "",
) -> None:
    """Compare the losses, device loads, speed and moved bytes of runs in a table and an HTML page."""
    from rich.console import Console

    from megatron_fssdp.cli.report_command import ReportRequest, compare_runs

    request = ReportRequest(runs, out, cluster, loads_only=loads_only)
    compare_runs(request.with_strategies(_names(strategies)), png, Console(markup=False))


@app.command("simulate", cls=NamingCommand)
def simulate_command(
    loads: Annotated[
        str,
        typer.Option(help="Folder of a recorded run, its loads.npy, or the name of a workload (W0 to W7)."),
    ],
    cluster: ClusterName,
    out: Annotated[Path, typer.Option(help="Folder to write the results to.")],
    model: Annotated[
        list[Path] | None,
        typer.Option(
            help="YAML of the run. Repeatable for parts of a run. Default: the recorded run's own settings.",
            metavar="RUN.yaml",
        ),
    ] = None,
    strategies: Annotated[
        str, typer.Option(help="Strategies to simulate, separated by commas, of {strategies}.")
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
    cluster_set: ClusterValues = None,
    moe_strategy_set: StrategySettings = None,
    break_even: Annotated[
        bool, typer.Option(help="Find the batch size and bandwidth at which each strategy starts to pay.")
    ] = True,
    plots: Annotated[bool, typer.Option(help="Write the HTML page and the pictures.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of generated loads.")] = 0,
) -> None:
    """Predict which strategy is fastest on a cluster, from recorded or generated loads."""
    from rich.console import Console

    from megatron_fssdp.cli.simulate_command import SimulateRequest, recorded_settings, run_simulation

    request = SimulateRequest(
        loads=loads,
        cluster=cluster,
        models=model or recorded_settings(loads),
        strategies=_names(strategies),
        out=out,
        iterations=iterations,
        overrides=settings or (),
        cluster_overrides=cluster_set or (),
        strategy_overrides=moe_strategy_set or (),
        with_break_even=break_even,
        with_plots=plots,
        seed=seed,
    )
    run_simulation(request, Console(markup=False))


@app.command("roofline")
def roofline_command(
    run: Annotated[Path, typer.Argument(help="Output folder of a recorded run.", metavar="RUN_DIR")],
    cluster: ClusterName,
    strategies: Annotated[
        str,
        typer.Option(help="Strategies to draw, separated by commas. Default: ep and the run's strategy."),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder to write the results to. Default: the run's folder.")
    ] = None,
    cluster_set: ClusterValues = None,
    moe_strategy_set: StrategySettings = None,
) -> None:
    """Draw how close a run's MoE layers come to the limits of compute and communication (FasterMoE, §3.3)."""
    from rich.console import Console

    from megatron_fssdp.cli.roofline_command import RooflineRequest, run_roofline

    request = RooflineRequest(
        run=run,
        cluster=cluster,
        strategies=_names(strategies),
        out=out,
        cluster_overrides=cluster_set or (),
        strategy_overrides=moe_strategy_set or (),
    )
    run_roofline(request, Console(markup=False))


@app.command("configs")
def configs_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files or names to combine and print as one YAML. Later ones win.",
            metavar="[CONFIG.yaml...]",
        ),
    ] = None,
) -> None:
    """List the runs and clusters that come with the package, or print one of them as YAML."""
    from megatron_fssdp.cli.configs_command import composed_yaml, shipped_names

    sys.stdout.write(composed_yaml(names) if names else shipped_names())


@app.command("schema")
def schema_command(
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Print the schema of a sweep's YAML instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of a run's YAML, or of a sweep's."""
    from megatron_fssdp.config.run.json_schema import run_config_schema_text
    from megatron_fssdp.config.sweep.json_schema import sweep_schema_text

    sys.stdout.write(sweep_schema_text() if sweep else run_config_schema_text())


@app.command("version")
def version_command() -> None:
    """Show the version and exit."""
    _show_version(True)


def main() -> None:
    """Entry point of the console script."""
    try:
        code = app(standalone_mode=False)
    except ConfigurationError as error:
        _say(str(error))
        sys.exit(EXIT_BAD_INPUT)
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "megatron-fssdp"
        message = error.format_message()
        if len(message.splitlines()) == 1:
            _say(f"{message.rstrip('.')}; see {command} --help")
        else:
            error.show()  # without arguments, the message is the help text
        sys.exit(EXIT_BAD_INPUT)
    except typer.Abort:
        _say("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        from megatron_fssdp.megatron_adapter.support.broken_packages import broken_package

        broken = broken_package(error)
        if broken is None:
            raise
        _say(broken.message())
        sys.exit(EXIT_BAD_INPUT)
    sys.exit(code)


def _say(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # under torchrun, only one of the ranks prints
        print(f"error: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
