"""The tokenized data of a run: built here, expected on other machines, or named by Megatron's arguments."""

import difflib
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import unknown_name
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.run.sections import DataSettings
from megatron_fssdp.data.built_data import DATA_NAME, MANIFEST_FILE, build_data, read_manifest
from megatron_fssdp.data.corpus import TEXT_KEY, corpus_from_paths, default_corpus
from megatron_fssdp.data.tokenizer import MIN_VOCAB_SIZE, SEP, SPECIAL_TOKENS, TRAINED_KINDS, load_pretrained
from megatron_fssdp.files.written_files import refuse_unwritable


def data_folder(settings: DataSettings, out_dir: Path) -> Path:
    """Return the folder of a run's data: by default one beside the output folder, for several runs."""
    if settings.path is not None:
        return settings.path
    size = "" if settings.tokenizer == "bytes" else f"-{settings.vocab_size}"
    return out_dir.parent / f"data-{settings.tokenizer}{size}"


def unbuilt_folder(settings: DataSettings, out_dir: Path) -> Path | None:
    """Return where the default corpus must be built, if the run trains on it and its data does not exist."""
    folder = data_folder(settings, out_dir)
    is_built = settings.external or settings.path is not None or (folder / MANIFEST_FILE).exists()
    return None if is_built else folder


def read_data(config: RunConfig, out_dir: Path) -> dict[str, Any]:
    """Return Megatron's arguments that name the data of a run; none for ``data.external``.

    Raises:
        ConfigurationError: There is no such data, or it has too few documents for its split.
    """
    if config.data.external:
        return {}
    folder, family = data_folder(config.data, out_dir), config.model.family
    manifest = read_manifest(folder)
    if (manifest.tokenizer == "wordpiece") != (family == "bert"):
        raise ConfigurationError(
            f"{folder}: got data built with --tokenizer {manifest.tokenizer}, wanted --tokenizer "
            f"{'wordpiece' if family == 'bert' else 'bpe or bytes'} for model.family {family}; build it with "
            "`megatron-fssdp data build` and give its folder as data.path"
        )
    return data_arguments(config, folder, manifest.vocab_size, manifest.eod_id, manifest.num_documents)


def planned_data(config: RunConfig, out_dir: Path) -> tuple[str, dict[str, Any]]:
    """Return shell text that comes before a printed command, and what :func:`read_data` returns for it.

    Data that is not here is described as `megatron-fssdp data build` makes it from the settings of the run.
    """
    settings, folder = config.data, data_folder(config.data, out_dir)
    builds = unbuilt_folder(settings, out_dir) is not None
    if not builds and (settings.path is None or folder.exists()):
        return "", read_data(config, out_dir)
    tokenizer = "wordpiece" if config.model.family == "bert" else settings.tokenizer
    vocab_size = MIN_VOCAB_SIZE if tokenizer == "bytes" else settings.vocab_size
    eod_id = SPECIAL_TOKENS.index(SEP) if tokenizer == "wordpiece" else vocab_size - 1
    num_documents = len(default_corpus().files) if builds else None
    data = data_arguments(config, folder, vocab_size, eod_id, num_documents)
    if not builds:
        return (
            f"# not checked: data.path {str(settings.path)!r} does not exist on this machine; --vocab-size "
            f"{vocab_size} and --null-tokenizer-eod-id {eod_id} follow from data.vocab_size; set it to the "
            "size of the data's vocabulary\n"
        ), data
    words = ["megatron-fssdp", "data", "build", "--out", str(folder), "--tokenizer", settings.tokenizer]
    words += [] if tokenizer == "bytes" else ["--vocab-size", str(settings.vocab_size)]
    return f"# first, build the data:\n{shlex.join(words)}\n# then train:\n", data


def data_arguments(
    config: RunConfig, folder: Path, vocab_size: int, eod_id: int, num_documents: int | None
) -> dict[str, Any]:
    """Return Megatron's arguments for data in a folder; ``vocab_size`` counts the id that ends a document."""
    return {
        "data_path": folder / DATA_NAME,
        "data_cache_path": folder / "index_cache",
        "split": "1,0,0" if config.training.eval_interval is None else _split(config, num_documents),
        "tokenizer_type": "NullTokenizer",  # text never contains the id that ends a document
        "vocab_size": vocab_size,
        "null_tokenizer_eod_id": eod_id,
        # BERT's script needs the vocabulary itself, because it masks whole words.
        "tokenizer_model": folder if config.model.family == "bert" else None,
    }


def _split(config: RunConfig, num_documents: int | None) -> str:
    # If a part has no documents, Megatron searches it for tokens forever. It rounds the ends of parts so.
    shares = [float(share) for share in config.data.split.split(",")]
    total, end = max(sum(shares), 1e-9), 0.0
    for name, share in zip(("training", "validation", "test"), shares, strict=False):
        begin, end = end, end + share / total
        is_empty = num_documents and round(begin * num_documents) == round(end * num_documents)
        if is_empty and (share > 0 or name == "training"):
            raise ConfigurationError(
                f"data.split {config.data.split}: leaves none of the {num_documents} documents for the "
                f"{name} data; give it a larger share, or build the data from more files"
            )
    return config.data.split


def build_with_progress(
    console: Console,
    paths: list[Path],
    out: Path,
    tokenizer: str,
    vocab_size: int,
    rebuild: bool = False,
    json_key: str = TEXT_KEY,
    eod_token: str | None = None,
) -> None:
    """Do what ``megatron-fssdp data build`` does: build indexed data, and show progress and outcome."""
    refuse_unwritable(out, "--out")
    corpus = corpus_from_paths(paths, json_key) if paths else default_corpus()
    is_near = bool(difflib.get_close_matches(tokenizer, TRAINED_KINDS, n=1))
    if is_near and tokenizer not in TRAINED_KINDS and not Path(tokenizer).exists():
        raise ConfigurationError(f"--tokenizer: {unknown_name('tokenizer', tokenizer, TRAINED_KINDS)}")
    asked = tokenizer if tokenizer in TRAINED_KINDS else load_pretrained(tokenizer, eod_token)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        @cache
        def bar(phase: str) -> TaskID:
            if not console.is_terminal:
                console.print(f"{phase}…")
            return progress.add_task(phase)

        def show(phase: str, done: int, total: int) -> None:
            progress.update(bar(phase), completed=done, total=total)

        manifest, built = build_data(corpus, out, asked, vocab_size, rebuild, show)
    verb = "built from" if built else "up to date with"
    size = f"{manifest.num_documents:,} documents, {corpus.num_bytes / 1e6:,.1f} MB"
    tokens = f"{manifest.num_tokens:,} tokens, vocabulary {manifest.vocab_size:,}"
    console.print(f"{out}: {verb} {corpus.name} ({size}): {tokens}")
