"""Trains a model on this machine as YAML files describe it, or returns the command for other machines."""

import importlib.util
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from megatron_fssdp.config import run_lock
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.quiet_output import quiet_output
from megatron_fssdp.config.run.megatron_arguments import (
    Installation,
    TokenizedData,
    megatron_arguments,
    trace_folder,
)
from megatron_fssdp.config.run.rules import NO_CONTEXT_ON_CPU, shown_keys
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.written_files import refuse_non_folder
from megatron_fssdp.launch.failure_report import failure_reason
from megatron_fssdp.launch.rank_command import DEVICE_VARIABLE, RankCommand
from megatron_fssdp.launch.rank_processes import exit_code_after, run_ranks
from megatron_fssdp.launch.run_data import data_folder, must_be_built, planned_data, read_data
from megatron_fssdp.launch.run_folder import RunFolder, has_checkpoint
from megatron_fssdp.launch.train_request import TrainRequest
from megatron_fssdp.launch.training_progress import TrainingProgress

BuildData = Callable[[Path, str, int], object]
"""Builds the default corpus: takes the folder, the kind of tokenizer and the size of the vocabulary."""

_SIGNALS = {130: "Ctrl-C", 143: "SIGTERM"}
"""Names of what interrupted a run, by the exit code of the command."""

_FULL_BYTES = 1 << 20


def dry_run(request: TrainRequest) -> str:
    """Return the shell commands of a run, without building, writing or starting anything.

    They work in an empty folder: the default data is built first, if it does not exist yet. Data that exists
    only on the machines of the run is not checked, and the first line says so.

    Raises:
        ConfigurationError: The input is invalid, or the folder has no checkpoint to resume from.
    """
    config, folder = request.resolve(), request.folder
    refuse_non_folder(folder.path, "--out")
    if request.resume:
        folder.check(config.training, resume=True, overwrite=request.overwrite)
    before, data = planned_data(config, folder.path)
    command = _command(config, data, folder.path, request.resume)
    _check(command, is_here=False)
    return before + command.shell_text()


def train(request: TrainRequest, console: Console, build_data: BuildData) -> int:
    """Train on this machine and show the progress.

    Args:
        request: Options of the run.
        console: Console that shows the progress.
        build_data: Builds the default data if it does not exist yet.

    Returns:
        The exit code of the ranks, 130 after Ctrl-C, or 143 after SIGTERM.

    Raises:
        ConfigurationError: The input is invalid. No rank was started, and no folder was made.
    """
    config, folder, resume = request.resolve(), request.folder, request.resume
    check_startable(config)
    folder.check(config.training, resume, request.overwrite)
    if resume:
        folder.check_unchanged(config)
    if must_be_built(config.data, folder.path):
        _check(_command(config, planned_data(config, folder.path)[1], folder.path, resume))
        place = data_folder(config.data, folder.path)
        build_data(place, config.data.tokenizer, config.data.vocab_size)
    data = read_data(config, folder.path)
    if data is not None:
        own = config.data.model_copy(update={"path": data.prefix.parent})
        config = config.model_copy(update={"data": own})
    command = _command(config, data, folder.path, resume)
    _check(command)
    overrides = request.changed_settings()
    if request.overwrite and (aside := folder.move_aside()):
        _say(console, f"{folder.path}: the run that was here is now {aside}")
    lock = run_lock.hold(folder.path, "--out")
    try:
        folder.create(config, overrides)
        _say(console, f"{folder.path}: strategy {config.strategy.name}, log in {folder.log}")
        if resume and overrides:
            _say(console, f"settings of earlier options are kept ({folder.overrides})")
        return _run(config, command, folder, lock, console)
    finally:
        run_lock.release(folder.path)


def _run(config: RunConfig, command: RankCommand, folder: RunFolder, lock: int, console: Console) -> int:
    nproc, iterations = config.parallelism.nproc_per_node, config.training.train_iters
    log_start = folder.log.stat().st_size if folder.log.exists() else 0
    saves = config.training.save_checkpoints
    progress = TrainingProgress(folder.metrics, iterations, nproc, console, saves=saves)
    try:
        with progress:
            code = run_ranks(command, folder.path, folder.log, lock, progress.update)
    except KeyboardInterrupt as interrupt:
        saved = has_checkpoint(config.training.save or folder.checkpoints)
        again = "continue with --resume" if saved else "no checkpoint yet, start again with --overwrite"
        code = exit_code_after(interrupt)
        folder.note_stop(progress.reached, f"interrupted by {_SIGNALS[code]}")
        _say(console, f"interrupted; all ranks have ended; {again}")
        return code
    if code != 0 or progress.last is None:
        reason = failure_reason(folder.log, log_start)
        if shutil.disk_usage(folder.path).free < _FULL_BYTES:
            reason += f" (the disk of {folder.path} is full)"
        folder.note_stop(progress.reached, reason)
        _say(console, f"error: training failed: {reason}", style="red")
        _say(console, f"all output: {folder.log}")
        return code if code > 0 else 1
    if progress.reached < iterations:
        folder.note_stop(progress.reached, "an exit option asked for it")
        early = "the ranks stopped before the last iteration, as an exit option asked; the reason is in"
        _say(console, f"{early} {folder.log}")
    for trace in sorted(trace_folder(config.training, folder.path).glob("rank-*.json.gz")):
        _say(console, f"profiler's trace: {trace}; open it in https://ui.perfetto.dev")
    done = f"done: {progress.reached} iterations, loss {progress.last.lm_loss:.4f}"
    _say(console, f"{done}; next: megatron-fssdp report {shlex.quote(str(folder.path))}")
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


def _check(command: RankCommand, is_here: bool = True) -> None:
    """Check the arguments as the ranks will, in this process; they run on this machine, or on others."""
    with quiet_output():
        from megatron_fssdp.megatron_adapter.entry.argument_check import check_arguments

    cut = command.config.parallelism
    ranks_here = cut.nproc_per_node if is_here else None
    check_arguments(command.megatron_arguments, cut.world_size, on_cpu=command.on_cpu, ranks_here=ranks_here)


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
    if asked := os.environ.get(DEVICE_VARIABLE):
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


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, soft_wrap=True)
