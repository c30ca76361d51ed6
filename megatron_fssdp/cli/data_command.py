"""``megatron-fssdp data build``: builds training data and shows a progress bar."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megatron_fssdp.data.manifest import DataManifest

_KINDS = ("bpe", "bytes", "wordpiece")


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
    build_with_progress(paths or [], out, tokenizer, vocab_size, rebuild, json_key, eod_token)


def build_default_corpus(out: Path, tokenizer: str, vocab_size: int) -> "DataManifest":
    """Build the data of a run that names no text."""
    return build_with_progress([], out, tokenizer, vocab_size)


def build_with_progress(
    paths: list[Path],
    out: Path,
    tokenizer: str,
    vocab_size: int,
    rebuild: bool = False,
    json_key: str = "text",
    eod_token: str | None = None,
) -> "DataManifest":
    """Build indexed data, print what was built, and return its manifest; arguments are as in the command.

    Raises:
        ConfigurationError: The text cannot be read, or the folder cannot be written or has other files of the
            names.
    """
    import difflib

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    from megatron_fssdp.config.errors import ConfigurationError
    from megatron_fssdp.config.loading import unknown_name
    from megatron_fssdp.config.written_files import refuse_non_folder
    from megatron_fssdp.data.corpus import corpus_from_paths, default_corpus
    from megatron_fssdp.data.indexed_builder import build_data
    from megatron_fssdp.data.tokenizer import load_pretrained

    refuse_non_folder(out, "--out")
    if any(path.resolve() == out.resolve() for path in paths):
        raise ConfigurationError(f"--out {out}: is also the folder of the text; give another folder")
    corpus = corpus_from_paths(paths, json_key) if paths else default_corpus()
    if tokenizer not in _KINDS and difflib.get_close_matches(tokenizer, _KINDS, n=1):
        raise ConfigurationError(f"--tokenizer: {unknown_name('tokenizer', tokenizer, _KINDS)}")
    asked = tokenizer if tokenizer in _KINDS else load_pretrained(tokenizer, eod_token)
    console = Console(markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in bars:
                bars[phase] = progress.add_task(phase)
                if not console.is_terminal:
                    console.print(f"{phase}…", highlight=False)
            progress.update(bars[phase], completed=done, total=total)

        manifest, built = build_data(corpus, out, asked, vocab_size, rebuild, show)  # type: ignore[arg-type]
    verb = "built from" if built else "up to date with"
    size = f"{manifest.num_documents:,} documents, {corpus.num_bytes / 1e6:,.1f} MB"
    tokens = f"{manifest.num_tokens:,} tokens, vocabulary {manifest.vocab_size:,}"
    console.print(f"{out}: {verb} {corpus.name} ({size}): {tokens}", highlight=False, soft_wrap=True)
    return manifest
