"""The tokenized data of a run: built here, expected on other machines, or named by Megatron's arguments."""

import difflib
import shlex
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import unknown_name
from megatron_fssdp.config.run.megatron_arguments import TokenizedData
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.run.sections import DataSettings
from megatron_fssdp.data.built_data import DATA_NAME, MANIFEST_FILE, DataManifest, build_data, read_manifest
from megatron_fssdp.data.corpus import TEXT_KEY, corpus_from_paths, default_corpus
from megatron_fssdp.data.tokenizer import MIN_VOCAB_SIZE, SEP, SPECIAL_TOKENS, TRAINED_KINDS, load_pretrained


def data_folder(settings: DataSettings, out_dir: Path) -> Path:
    """Return the folder of a run's data: by default one beside the output folder, for several runs."""
    if settings.path is not None:
        return settings.path
    size = "" if settings.tokenizer == "bytes" else f"-{settings.vocab_size}"
    return out_dir.parent / f"data-{settings.tokenizer}{size}"


def must_be_built(settings: DataSettings, out_dir: Path) -> bool:
    """Whether the run trains on the default corpus, and its data does not exist yet."""
    is_default = not settings.external and settings.path is None
    return is_default and not (data_folder(settings, out_dir) / MANIFEST_FILE).exists()


def read_data(config: RunConfig, out_dir: Path) -> TokenizedData | None:
    """Return the data of a run; None if Megatron's own arguments name it (``data.external``).

    Raises:
        ConfigurationError: The folder has no built data, or data for another kind of model.
    """
    if config.data.external:
        return None
    folder, family = data_folder(config.data, out_dir), config.model.family
    manifest = read_manifest(folder)
    if (manifest.tokenizer == "wordpiece") != (family == "bert"):
        raise ConfigurationError(
            f"{folder}: got data built with --tokenizer {manifest.tokenizer}, wanted --tokenizer "
            f"{'wordpiece' if family == 'bert' else 'bpe or bytes'} for model.family {family}; build it with "
            "`megatron-fssdp data build` and give its folder as data.path"
        )
    return _tokenized(folder, manifest.vocab_size, manifest.eod_id, manifest.num_documents)


def planned_data(config: RunConfig, out_dir: Path) -> tuple[str, TokenizedData | None]:
    """Return the data for a printed command, and shell text that comes before it.

    Data that is not here is described as `megatron-fssdp data build` makes it from the settings of the run.
    """
    settings, folder = config.data, data_folder(config.data, out_dir)
    builds = must_be_built(settings, out_dir)
    if not builds and (settings.path is None or folder.exists()):
        return "", read_data(config, out_dir)
    tokenizer = "wordpiece" if config.model.family == "bert" else settings.tokenizer
    vocab_size = MIN_VOCAB_SIZE if tokenizer == "bytes" else settings.vocab_size
    eod_id = SPECIAL_TOKENS.index(SEP) if tokenizer == "wordpiece" else vocab_size - 1
    data = _tokenized(folder, vocab_size, eod_id, len(default_corpus().files) if builds else None)
    if not builds:
        return (
            f"# not checked: data.path {str(settings.path)!r} does not exist on this machine; --vocab-size "
            f"{vocab_size} and --null-tokenizer-eod-id {eod_id} follow from data.vocab_size; set it to the "
            "size of the data's vocabulary\n"
        ), data
    words = ["megatron-fssdp", "data", "build", "--out", str(folder), "--tokenizer", settings.tokenizer]
    words += [] if tokenizer == "bytes" else ["--vocab-size", str(settings.vocab_size)]
    return f"# first, build the data:\n{shlex.join(words)}\n# then train:\n", data


def _tokenized(folder: Path, vocab_size: int, eod_id: int, num_documents: int | None) -> TokenizedData:
    return TokenizedData(folder / DATA_NAME, vocab_size, eod_id, num_documents, folder / "index_cache")


def build_with_progress(
    paths: list[Path],
    out: Path,
    tokenizer: str,
    vocab_size: int,
    rebuild: bool = False,
    json_key: str = TEXT_KEY,
    eod_token: str | None = None,
) -> DataManifest:
    """Build indexed data, show a progress bar and what was built, and return the manifest.

    The arguments are those of ``megatron-fssdp data build``. Without paths, the default corpus is built.

    Raises:
        ConfigurationError: The text cannot be read, or the folder cannot be written or has other files of the
            names.
    """
    corpus = corpus_from_paths(paths, json_key) if paths else default_corpus()
    if tokenizer not in TRAINED_KINDS and difflib.get_close_matches(tokenizer, TRAINED_KINDS, n=1):
        raise ConfigurationError(f"--tokenizer: {unknown_name('tokenizer', tokenizer, TRAINED_KINDS)}")
    asked = tokenizer if tokenizer in TRAINED_KINDS else load_pretrained(tokenizer, eod_token)
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

        manifest, built = build_data(corpus, out, asked, vocab_size, rebuild, show)
    verb = "built from" if built else "up to date with"
    size = f"{manifest.num_documents:,} documents, {corpus.num_bytes / 1e6:,.1f} MB"
    tokens = f"{manifest.num_tokens:,} tokens, vocabulary {manifest.vocab_size:,}"
    console.print(f"{out}: {verb} {corpus.name} ({size}): {tokens}", highlight=False, soft_wrap=True)
    return manifest
