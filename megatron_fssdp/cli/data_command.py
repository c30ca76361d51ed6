"""``megatron-fssdp data build``: builds training data and shows a progress bar."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from megatron_fssdp.data.corpus import corpus_from_paths, default_corpus
from megatron_fssdp.data.indexed_builder import build_data
from megatron_fssdp.data.manifest import DataManifest
from megatron_fssdp.data.tokenizer import TokenizerKind


def build_with_progress(
    paths: list[Path],
    out_dir: Path,
    tokenizer: TokenizerKind,
    vocab_size: int,
    num_shards: int,
    rebuild: bool,
    with_tests: bool,
    console: Console,
) -> DataManifest:
    """Build indexed data and print what was built.

    Args:
        paths: Text files and folders. An empty list means the default corpus.
        out_dir: Folder to write the data to.
        tokenizer: Kind of tokenizer.
        vocab_size: Vocabulary size of a trained tokenizer.
        num_shards: Number of shards. An interrupted build does not repeat its finished shards.
        rebuild: Whether to replace data that is damaged or was built from other text.
        with_tests: Whether the default corpus includes the tests of the standard library.
        console: Console that shows the progress and the result.

    Returns:
        The manifest of the data.
    """
    corpus = corpus_from_paths(paths) if paths else default_corpus(with_tests)
    size = f"{len(corpus.files):,} documents, {corpus.num_bytes / 1e6:,.1f} MB"
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in bars:
                bars[phase] = progress.add_task(phase)
                if not console.is_terminal:
                    console.print(f"{phase}…", highlight=False)
            progress.update(bars[phase], completed=done, total=total)

        manifest, built = build_data(corpus, out_dir, tokenizer, vocab_size, num_shards, rebuild, show)
    verb = "built from" if built else "up to date with"
    console.print(
        f"{out_dir}: {verb} {corpus.name} ({size}): {manifest.num_tokens:,} tokens, "
        f"vocabulary {manifest.vocab_size:,}",
        highlight=False,
        soft_wrap=True,
    )
    return manifest
