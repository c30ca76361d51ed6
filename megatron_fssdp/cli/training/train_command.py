"""``megatron-fssdp train``: trains a model as YAML files describe it."""

import importlib.util
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_fssdp.cli.ranks.rank_command import RankCommand
from megatron_fssdp.cli.training.run_folder import has_checkpoint
from megatron_fssdp.cli.training.train_request import TrainRequest
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.megatron_arguments import (
    Installation,
    TokenizedData,
    megatron_arguments,
    trace_folder,
)
from megatron_fssdp.config.run.rules import NO_CONTEXT_ON_CPU, shown_keys
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.run.sections import DataSettings
from megatron_fssdp.config.written_files import refuse_non_folder
from megatron_fssdp.data.corpus import default_corpus
from megatron_fssdp.data.manifest import DATA_NAME, MANIFEST_FILE, read_manifest
from megatron_fssdp.data.tokenizer import MIN_VOCAB_SIZE
from megatron_fssdp.data.wordpiece import SEP, SPECIAL_TOKENS

if TYPE_CHECKING:
    from megatron_fssdp.cli.ranks.training_progress import TrainingProgress

_DEVICE_VARIABLE = "MEGATRON_FSSDP_DEVICE"
_SIGNALS = {130: "Ctrl-C", 143: "SIGTERM"}
"""Names of what interrupted a run, by the exit code of the command."""


def dry_run(request: TrainRequest) -> str:
    """Return the shell commands of a run, without building, writing or starting anything.

    They work in an empty folder: the default data is built first, if it does not exist yet. Data that exists
    only on the machines of the run is not checked, and the first line says so.

    Args:
        request: Options of the run.

    Raises:
        ConfigurationError: The input is invalid, or the folder has no checkpoint to resume from.
    """
    config, folder = request.resolve(), request.folder
    refuse_non_folder(folder.path, "--out")
    if request.resume:
        folder.check(config.training, resume=True, overwrite=request.overwrite)
    if config.data.external:
        return _command(config, None, folder.path, request.resume).shell_text()
    place = _data_dir(config.data, folder.path)
    is_default = config.data.path is None and not (place / MANIFEST_FILE).exists()
    is_elsewhere = config.data.path is not None and not place.exists()
    data = _expected_data(config, place) if is_default or is_elsewhere else _read_data(config, place)
    text = _command(config, data, folder.path, request.resume).shell_text()
    if is_default:
        return f"# first, build the data:\n{_build_command(config.data, data)}\n# then train:\n{text}"
    return f"{_unchecked(config.data, data)}\n{text}" if is_elsewhere else text


def train(request: TrainRequest, console: Console) -> int:
    """Train on this machine and show the progress.

    Args:
        request: Options of the run.
        console: Console that shows the progress.

    Returns:
        The exit code of the ranks, 130 after Ctrl-C, or 143 after SIGTERM.

    Raises:
        ConfigurationError: The input is invalid. No rank was started.
    """
    from megatron_fssdp.cli.ranks.failure_report import failure_reason
    from megatron_fssdp.cli.ranks.rank_processes import exit_code_after, run_ranks
    from megatron_fssdp.cli.ranks.training_progress import TrainingProgress

    config = request.resolve()
    check_startable(config)
    folder, resume = request.folder, request.resume
    folder.check(config.training, resume, request.overwrite)
    if resume:
        folder.check_unchanged(config)
    data = _built_data(config, folder.path, console)
    if data is not None:
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"path": data.prefix.parent})}
        )
    command = _command(config, data, folder.path, resume)
    overrides = request.changed_settings()
    if request.overwrite:
        folder.delete_run()
    folder.create(config, overrides)
    log_start = folder.log.stat().st_size if folder.log.exists() else 0
    console.print(
        f"{folder.path}: strategy {config.strategy.name}, log in {folder.log}",
        highlight=False,
        soft_wrap=True,
    )
    if resume and overrides:
        console.print(
            f"settings of earlier options are kept ({folder.overrides})", highlight=False, soft_wrap=True
        )
    nproc, iterations = config.parallelism.nproc_per_node, config.training.train_iters
    saves = config.training.save_checkpoints
    progress = TrainingProgress(folder.metrics, iterations, nproc, console, saves=saves)
    try:
        with progress:
            code = run_ranks(command, folder.log, progress.update)
    except KeyboardInterrupt as interrupt:
        checkpoints = config.training.save or folder.checkpoints
        again = (
            "continue with --resume"
            if has_checkpoint(checkpoints)
            else "no checkpoint yet, start again with --overwrite"
        )
        code = exit_code_after(interrupt)
        folder.note_stop(_reached(progress), f"interrupted by {_SIGNALS[code]}")
        console.print(f"interrupted; all ranks have ended; {again}", highlight=False)
        return code
    if code != 0 or progress.last is None:
        reason = failure_reason(folder.log, log_start)
        folder.note_stop(_reached(progress), reason)
        console.print(
            f"error: training failed: {reason}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        console.print(f"all output: {folder.log}", highlight=False, soft_wrap=True)
        return code if code > 0 else 1
    if progress.last.iteration < iterations:
        folder.note_stop(progress.last.iteration, "an exit option asked for it")
        console.print(
            "the ranks stopped before the last iteration, as an exit option asked; the reason is in "
            f"{folder.log}",
            highlight=False,
            soft_wrap=True,
        )
    for trace in sorted(trace_folder(config.training, folder.path).glob("rank-*.json.gz")):
        console.print(
            f"profiler's trace: {trace}; open it in https://ui.perfetto.dev", highlight=False, soft_wrap=True
        )
    console.print(
        f"done: {progress.last.iteration} iterations, loss {progress.last.lm_loss:.4f}; next: "
        f"megatron-fssdp report {shlex.quote(str(folder.path))}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def check_startable(config: RunConfig) -> None:
    """Refuse a run whose ranks this command cannot start.

    Raises:
        ConfigurationError: The run needs several machines, or a package that is not installed.
    """
    if config.parallelism.num_nodes > 1:
        raise ConfigurationError(
            f"parallelism.num_nodes {config.parallelism.num_nodes}: this command starts the ranks of one "
            "machine; use --dry-run and run the printed command on every machine"
        )
    training = config.training
    key = "tensorboard" if training.tensorboard else "tensorboard_dir"
    if getattr(training, key) and importlib.util.find_spec("tensorboard") is None:
        raise ConfigurationError(
            f"training.{key} {getattr(training, key)}: the package tensorboard is not installed; install it "
            "with `pip install tensorboard`, or remove the key"
        )


def _reached(progress: "TrainingProgress") -> int:
    return 0 if progress.last is None else progress.last.iteration


def _command(config: RunConfig, data: TokenizedData | None, out_dir: Path, resume: bool) -> RankCommand:
    on_cpu = _runs_on_cpu(config.training.device)
    if on_cpu and config.parallelism.context_parallel_size > 1:
        raise ConfigurationError(NO_CONTEXT_ON_CPU.format_map(shown_keys(config)))
    has_te = not on_cpu and _has_transformer_engine(config.training.transformer_engine)
    installation = Installation(on_cpu=on_cpu, has_transformer_engine=has_te)
    return RankCommand(config, megatron_arguments(config, data, installation, out_dir, resume), on_cpu)


def _runs_on_cpu(device: str) -> bool:
    if device != "auto":
        return device == "cpu"
    if asked := os.environ.get(_DEVICE_VARIABLE):
        return asked.lower() == "cpu"
    import torch

    return not torch.cuda.is_available()


def _has_transformer_engine(stated: bool | None) -> bool:
    """Whether the GPU machines of a run have Transformer Engine.

    A machine without GPUs cannot run the ranks. It only prints their command, so what it has installed says
    nothing about them.
    """
    if stated is not None:
        return stated
    import torch

    return not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is not None


def _data_dir(settings: DataSettings, out_dir: Path) -> Path:
    if settings.path is not None:
        return settings.path
    size = "" if settings.tokenizer == "bytes" else f"-{settings.vocab_size}"
    return out_dir.parent / f"data-{settings.tokenizer}{size}"


def _build_command(settings: DataSettings, data: TokenizedData) -> str:
    words = ["megatron-fssdp", "data", "build", "--out", str(data.prefix.parent)]
    words += ["--tokenizer", settings.tokenizer]
    if settings.tokenizer != "bytes":
        words += ["--vocab-size", str(settings.vocab_size)]
    return shlex.join(words)


def _built_data(config: RunConfig, out_dir: Path, console: Console) -> TokenizedData | None:
    """Return the run's data. The default corpus is built first if it does not exist yet."""
    settings = config.data
    if settings.external:
        return None
    folder = _data_dir(settings, out_dir)
    if settings.path is None and not (folder / MANIFEST_FILE).exists():
        from megatron_fssdp.cli.training.data_command import build_with_progress

        build_with_progress([], folder, settings.tokenizer, settings.vocab_size, False, console)
    return _read_data(config, folder)


def _expected_data(config: RunConfig, folder: Path) -> TokenizedData:
    """Return data that is not here as `megatron-fssdp data build` makes it from the settings of the run."""
    tokenizer = "wordpiece" if config.model.family == "bert" else config.data.tokenizer
    vocab_size = MIN_VOCAB_SIZE if tokenizer == "bytes" else config.data.vocab_size
    eod_id = SPECIAL_TOKENS.index(SEP) if tokenizer == "wordpiece" else vocab_size - 1
    num_documents = len(default_corpus().files) if config.data.path is None else None
    return _tokenized(folder, vocab_size, eod_id, num_documents)


def _unchecked(settings: DataSettings, data: TokenizedData) -> str:
    return (
        f"# not checked: data.path {str(settings.path)!r} does not exist on this machine; --vocab-size "
        f"{data.vocab_size} and --null-tokenizer-eod-id {data.eod_id} follow from data.vocab_size; set it to "
        "the size of the data's vocabulary"
    )


def _read_data(config: RunConfig, folder: Path) -> TokenizedData:
    """Return the data in a folder.

    Raises:
        ConfigurationError: The folder has no built data, or data for another kind of model.
    """
    manifest = read_manifest(folder)
    if (manifest.tokenizer == "wordpiece") != (config.model.family == "bert"):
        wanted = "--tokenizer wordpiece" if config.model.family == "bert" else "--tokenizer bpe or bytes"
        raise ConfigurationError(
            f"{folder}: got data built with --tokenizer {manifest.tokenizer}, wanted {wanted} for "
            f"model.family {config.model.family}; build it with `megatron-fssdp data build` and give "
            "its folder as data.path"
        )
    return _tokenized(folder, manifest.vocab_size, manifest.eod_id, manifest.num_documents)


def _tokenized(folder: Path, vocab_size: int, eod_id: int, num_documents: int | None) -> TokenizedData:
    return TokenizedData(folder / DATA_NAME, vocab_size, eod_id, num_documents, folder / "index_cache")
