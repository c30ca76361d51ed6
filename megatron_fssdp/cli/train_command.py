"""``megatron-fssdp train``: trains a model as YAML files describe it."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_fssdp.cli.shared_options import SHIPPED_NAMES, Texts, key_values, plain_console, strategy_names
from megatron_fssdp.config.shipped_files import shipped_runs


def train_command(
    context: typer.Context,
    configs: Annotated[
        list[Path],
        typer.Argument(
            help="YAML files of the run, or names that `megatron-fssdp configs` lists. Later files win.",
            metavar="CONFIG.yaml...",
            autocompletion=shipped_runs,
        ),
    ],
    moe_strategy: Annotated[
        str | None,
        typer.Option(
            help=f"Strategy that replaces the one in the files: {SHIPPED_NAMES}, or one of another package.",
            autocompletion=strategy_names,
        ),
    ] = None,
    moe_strategy_set: Annotated[Texts, key_values("A setting of the strategy, for example slots=2.")] = None,
    settings: Annotated[
        Texts, key_values("Any setting of the run, for example training.seed=7.", "--set")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Number of ranks on this machine.")] = None,
    iters: Annotated[
        int | None, typer.Option(help="Number of training iterations. Warm-up ends before the last.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder. Default: a folder in runs/, named after the files.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the run, print its torchrun command and start nothing.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in the output folder from its last checkpoint, with its earlier options.",
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Start a new run; one that is in the output folder is renamed to OUT.old-TIME.",
        ),
    ] = False,
) -> None:
    """Train a model on this machine, or print the command for a cluster.

    Words after -- are passed on to Megatron-LM, for example: -- --moe-grouped-gemm
    """
    from megatron_fssdp.launch.train_request import TrainRequest
    from megatron_fssdp.launch.training import printed_command, train

    request = TrainRequest(
        config_paths=configs,
        strategy=moe_strategy,
        strategy_overrides=moe_strategy_set or (),
        overrides=settings or (),
        nproc=nproc,
        iterations=iters,
        out=out,
        megatron_words=context.obj or (),
        resume=resume,
        overwrite=overwrite,
    )
    if dry_run:
        print(printed_command(request))
    else:
        raise typer.Exit(train(request, plain_console()))
