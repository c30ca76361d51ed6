"""The command ``megatron-fssdp``. Heavy imports happen inside the commands."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_fssdp import __version__
from megatron_fssdp.config.errors import ConfigurationError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_UsageError: Any = typer.BadParameter.__base__
"""What typer raises for a wrong command line; it has no name of its own there."""

app = typer.Typer(
    name="megatron-fssdp",
    help="Load-balanced Mixture-of-Experts training on stock Megatron-LM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Training data.", no_args_is_help=True)
app.add_typer(data_app, name="data")


class TokenizerName(StrEnum):
    """Kinds of tokenizer."""

    BPE = "bpe"
    BYTES = "bytes"
    WORDPIECE = "wordpiece"


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _show_version(asked: bool) -> None:
    if asked:
        print(f"megatron-fssdp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Load-balanced Mixture-of-Experts training on stock Megatron-LM."""


@app.command("train")
def train_command(
    configs: Annotated[
        list[Path],
        typer.Argument(
            help="YAML of the run, or parts of it, as files or as names of shipped ones; later ones win.",
            metavar="CONFIG.yaml...",
        ),
    ],
    moe_strategy: Annotated[str | None, typer.Option(help="Strategy instead of the files'.")] = None,
    moe_strategy_set: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A setting of the strategy, e.g. slots=2; repeatable."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting, e.g. training.seed=7; repeatable."),
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine.")] = None,
    iters: Annotated[int | None, typer.Option(help="Training iterations.")] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: below runs/.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the torchrun command.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
) -> None:
    """Train a model on this machine, or print the command for a cluster."""
    from rich.console import Console

    from megatron_fssdp.cli import train_command as training

    request = training.TrainRequest(
        config_paths=configs,
        strategy=moe_strategy,
        strategy_overrides=moe_strategy_set or (),
        overrides=settings or (),
        nproc=nproc,
        iterations=iters,
        out=out,
    )
    if dry_run:
        print(training.dry_run(request, resume))
        return
    raise typer.Exit(training.train(request, resume, Console(markup=False)))


@app.command("profile")
def profile_command(
    out: Annotated[Path, typer.Option(help="YAML to write.", metavar="CLUSTER.yaml")],
    nproc: Annotated[int | None, typer.Option(help="Ranks to start here; not under torchrun.")] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Equal nodes, in rank order. Default: torchrun's machines.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="gloo or nccl. Default: nccl with CUDA.")] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(help="Run whose layers are computed; repeatable for parts of it.", metavar="RUN.yaml"),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The cluster's name. Default: that of the file.")] = None,
    least_bytes: Annotated[int, typer.Option(help="Smallest message.")] = 1 << 10,
    most_bytes: Annotated[int, typer.Option(help="Largest message.")] = 1 << 24,
    repetitions: Annotated[int, typer.Option(help="Measured ones; their median counts.")] = 7,
) -> None:
    """Measure links and compute of the ranks that torchrun started, or of new ones on this machine."""
    from megatron_fssdp.cli.profile_command import ProfileRequest, profile
    from megatron_fssdp.config.composition import load_run
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
        Path | None, typer.Option(help="Folder of checkpoints: writable, and room?", metavar="DIR")
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            help="Run whose ranks and checkpoints are to fit; repeatable for parts of it.",
            metavar="CONFIG.yaml",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Report for machines.")] = False,
) -> None:
    """Say whether a training can run on this machine, and what to do if it cannot."""
    from megatron_fssdp.cli.doctor_command import DoctorRequest, examine

    raise typer.Exit(examine(DoctorRequest(config or (), checkpoints, as_json)))


@data_app.command("build")
def data_build_command(
    out: Annotated[Path, typer.Option(help="Folder of the built data.")],
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Text files and folders. Default: the standard library's sources."),
    ] = None,
    tokenizer: Annotated[
        TokenizerName,
        typer.Option(help="Trained byte-level BPE, one token a byte, or BERT's: sentences in WordPiece."),
    ] = TokenizerName.BPE,
    vocab_size: Annotated[int, typer.Option(help="Vocabulary of a trained tokenizer.")] = 4096,
    shards: Annotated[int, typer.Option(help="Pieces that an interrupted build does not repeat.")] = 4,
    with_tests: Annotated[
        bool, typer.Option("--with-tests", help="Default corpus: the library's tests too.")
    ] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Replace data that is damaged or built from other text.")
    ] = False,
) -> None:
    """Tokenize text into Megatron's indexed data; a second time, nothing is left to do."""
    from rich.console import Console

    from megatron_fssdp.cli.data_command import build_with_progress

    console = Console(markup=False)
    build_with_progress(paths or [], out, tokenizer.value, vocab_size, shards, rebuild, with_tests, console)


@app.command("report")
def report_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN_DIR")],
    out: Annotated[
        Path | None, typer.Option(help="Page to write. Default: report.html in the run's folder.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Rank strategies on it: YAML of a cluster, or a name from configs/clusters."),
    ] = None,
    strategies: Annotated[str, typer.Option(help="Those to rank, with commas. Default: all.")] = "",
) -> None:
    """Write a page of HTML with a run's losses, loads, seconds, placements and memory."""
    from rich.console import Console

    from megatron_fssdp.cli.report_command import ReportRequest, write_report_page

    request = ReportRequest([run], out, cluster)
    write_report_page(request.with_strategies(_names(strategies)), Console(markup=False))


@app.command("compare")
def compare_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of two or more runs.", metavar="RUN_DIR...")],
    out: Annotated[
        Path | None, typer.Option(help="Page to write. Default: comparison.html in the first run's folder.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the device loads into this file.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Rank strategies on it: YAML of a cluster, or a name from configs/clusters."),
    ] = None,
    strategies: Annotated[str, typer.Option(help="Those to rank, with commas. Default: all.")] = "",
) -> None:
    """Compare runs, in a table and a page of HTML: losses, device loads, speed and bytes moved."""
    from rich.console import Console

    from megatron_fssdp.cli.report_command import ReportRequest, compare_runs

    request = ReportRequest(runs, out, cluster)
    compare_runs(request.with_strategies(_names(strategies)), png, Console(markup=False))


@app.command("simulate")
def simulate_command(
    loads: Annotated[
        str, typer.Option(help="Folder of a recorded run, its loads.npz, or a workload's name.")
    ],
    cluster: Annotated[str, typer.Option(help="YAML of a cluster, or a name from configs/clusters.")],
    model: Annotated[
        list[Path], typer.Option(help="YAML of the run; repeatable for parts of it.", metavar="RUN.yaml")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    strategies: Annotated[str, typer.Option(help="Names, with commas between them.")] = "ep,fssdp",
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1, max=100_000, help="Iterations to generate (20), or most to take of a record (all)."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the run; repeatable."),
    ] = None,
    cluster_set: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A figure of the cluster; repeatable.")
    ] = None,
    moe_strategy_set: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A setting of all strategies that know it; repeatable."),
    ] = None,
    break_even: Annotated[bool, typer.Option(help="Search where strategies stop paying.")] = True,
    plots: Annotated[bool, typer.Option(help="Draw pictures.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of generated loads.")] = 0,
) -> None:
    """Predict which strategy is fastest on a cluster, from recorded or generated loads."""
    from rich.console import Console

    from megatron_fssdp.cli.simulate_command import SimulateRequest, run_simulation

    request = SimulateRequest(
        loads=loads,
        cluster=cluster,
        models=model,
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
    run: Annotated[Path, typer.Argument(help="Folder of a recorded run.", metavar="RUN_DIR")],
    cluster: Annotated[str, typer.Option(help="YAML of a cluster, or a name from configs/clusters.")],
    strategies: Annotated[
        str, typer.Option(help="Names, with commas between them. Default: ep and the run's own.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Folder of the results. Default: the run's.")] = None,
    cluster_set: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A figure of the cluster; repeatable.")
    ] = None,
    moe_strategy_set: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A setting of all strategies that know it; repeatable."),
    ] = None,
) -> None:
    """Draw how near a run's MoE layers come to what compute and communication allow (FasterMoE, §3.3)."""
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
        typer.Argument(help="Print these, laid over one another, as one YAML.", metavar="[CONFIG.yaml...]"),
    ] = None,
) -> None:
    """List the runs and clusters that come with the package, or print the YAML of one."""
    from megatron_fssdp.cli.configs_command import composed_yaml, shipped_names

    sys.stdout.write(composed_yaml(names) if names else shipped_names())


@app.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of a run's YAML."""
    from megatron_fssdp.config.json_schema import run_config_schema_text

    sys.stdout.write(run_config_schema_text())


@app.command("version")
def version_command() -> None:
    """Show the version."""
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
            error.show()  # nothing was asked: the help
        sys.exit(EXIT_BAD_INPUT)
    except typer.Abort:
        _say("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code)


def _say(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # under torchrun, one of the ranks speaks
        print(f"error: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
