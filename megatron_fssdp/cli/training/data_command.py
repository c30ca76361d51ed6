"""``megatron-fssdp data build``: builds training data and shows a progress bar."""

import difflib
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import unknown_name
from megatron_fssdp.config.written_files import refuse_non_folder
from megatron_fssdp.data.corpus import TEXT_KEY, corpus_from_paths, default_corpus
from megatron_fssdp.data.indexed_builder import build_data
from megatron_fssdp.data.manifest import DataManifest
from megatron_fssdp.data.tokenizer import TokenizerKind, load_pretrained

_KINDS: dict[str, TokenizerKind] = {"bpe": "bpe", "bytes": "bytes", "wordpiece": "wordpiece"}


def build_with_progress(
    paths: list[Path],
    out_dir: Path,
    tokenizer: str,
    vocab_size: int,
    rebuild: bool,
    console: Console,
    *,
    json_key: str = TEXT_KEY,
    eod_token: str | None = None,
) -> DataManifest:
    """Build indexed data and print what was built.

    Args:
        paths: Text files and folders. An empty list means the default corpus.
        out_dir: Folder to write the data to.
        tokenizer: Kind of tokenizer to train (``bpe``, ``wordpiece``), ``bytes``, or the name, folder or file
            of a tokenizer in Hugging Face's format.
        vocab_size: Vocabulary size of a trained tokenizer.
        rebuild: Whether to replace existing data.
        console: Console that shows the progress and the result.
        json_key: Key that holds the text in lines of ``.jsonl`` and ``.json`` files.
        eod_token: Token of a Hugging Face tokenizer that ends a document, or None for its own.

    Returns:
        The manifest of the data.
    """
    refuse_non_folder(out_dir, "--out")
    corpus = corpus_from_paths(paths, json_key) if paths else default_corpus()
    if tokenizer not in _KINDS and difflib.get_close_matches(tokenizer, _KINDS, n=1):
        raise ConfigurationError(f"--tokenizer: {unknown_name('tokenizer', tokenizer, _KINDS)}")
    asked = _KINDS.get(tokenizer) or load_pretrained(tokenizer, eod_token)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in bars:
                bars[phase] = progress.add_task(phase)
                if not console.is_terminal:
                    console.print(f"{phase}…", highlight=False)
            progress.update(bars[phase], completed=done, total=total)

        manifest, built = build_data(corpus, out_dir, asked, vocab_size, rebuild, show)
    verb = "built from" if built else "up to date with"
    size = f"{manifest.num_documents:,} documents, {corpus.num_bytes / 1e6:,.1f} MB"
    console.print(
        f"{out_dir}: {verb} {corpus.name} ({size}): {manifest.num_tokens:,} tokens, "
        f"vocabulary {manifest.vocab_size:,}",
        highlight=False,
        soft_wrap=True,
    )
    return manifest
