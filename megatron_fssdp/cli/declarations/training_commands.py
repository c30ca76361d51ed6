"""The options of ``train``, ``sweep`` and ``data build``."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_fssdp.cli.declarations.command_classes import MEGATRON_WORDS


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

    from megatron_fssdp.cli.training.train_command import dry_run as command_of_run
    from megatron_fssdp.cli.training.train_command import train
    from megatron_fssdp.cli.training.train_request import TrainRequest

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

    from megatron_fssdp.cli.training.sweep_command import SweepRequest, listing, prepare, run_sweep

    prepared = prepare(SweepRequest(sweep, out))
    if dry_run:
        print(listing(prepared))
        return
    raise typer.Exit(run_sweep(prepared, Console(markup=False)))


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
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Replace existing data.")] = False,
) -> None:
    """Tokenize text into Megatron's indexed data. Data that is up to date is not built again."""
    from rich.console import Console

    from megatron_fssdp.cli.training.data_command import build_with_progress

    console = Console(markup=False)
    build_with_progress(
        *(paths or [], out, tokenizer, vocab_size, rebuild, console),
        json_key=json_key,
        eod_token=eod_token,
    )
