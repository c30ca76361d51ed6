"""``megatron-fssdp data build``: builds training data."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_fssdp.cli.shared_options import plain_console


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
    from megatron_fssdp.launch.run_data import build_with_progress

    build_with_progress(
        plain_console(), paths or [], out, tokenizer, vocab_size, rebuild, json_key, eod_token
    )
