"""Trains a model on this machine as YAML files describe it, or returns the command for other machines."""

import importlib.util
import resource
import shlex
import shutil
import tempfile
import time
from collections import deque
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.text import Text

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.files import run_lock
from megatron_fssdp.files.written_files import refuse_non_folder, refuse_unwritable
from megatron_fssdp.launch.rank_command import RankCommand, rank_command
from megatron_fssdp.launch.rank_processes import exit_code_after, failure_reason, run_to_the_end
from megatron_fssdp.launch.run_data import build_with_progress, planned_data, read_data, unbuilt_folder
from megatron_fssdp.launch.run_folder import RunFolder, saved_iteration
from megatron_fssdp.launch.train_request import TrainRequest
from megatron_fssdp.records.metrics import IterationMetrics, last_metrics

INTERRUPTIONS = {130: "Ctrl-C", 143: "SIGTERM"}
"""What interrupted a run, by the exit code of the command."""

_FULL_BYTES = 1 << 20
_RECENT = 20
_PLAIN_INTERVAL_S = 10.0


class TrainingProgress:
    """Shows the progress of a run: one live line on a terminal, or a line every 10 seconds elsewhere.

    ``metrics`` is the run's ``metrics.jsonl``. With ``saves``, a checkpoint follows the last iteration.
    """

    def __init__(
        self, metrics: Path, iterations: int, nproc: int, console: Console, *, saves: bool = False
    ) -> None:
        self._metrics = metrics
        self.last: IterationMetrics | None = None  # the newest record of this start
        before = last_metrics(metrics)  # of a run that is resumed
        self._seen = before and (before.iteration, before.iteration_s)
        self._iterations, self._saves = iterations, saves
        self._console, self._start = console, f"starting {nproc} ranks"
        self._status = console.status(self._start)  # does nothing where there is no terminal
        self._durations_s: deque[float] = deque(maxlen=_RECENT)
        self._printed_s = 0.0
        self._printed: IterationMetrics | None = None

    @property
    def reached(self) -> int:
        """Number of the last recorded iteration; 0 if there is none."""
        return 0 if self.last is None else self.last.iteration

    def __enter__(self) -> "TrainingProgress":
        self._status.start()
        if not self._console.is_terminal:
            self._console.print(self._start)
        return self

    def __exit__(self, *exception: object) -> None:
        self._status.stop()
        self._saves = False
        self._print()

    def update(self) -> None:
        """Show the newest iteration, if there is a new one."""
        record = last_metrics(self._metrics)
        if record is not None and self._seen != (record.iteration, record.iteration_s):
            self.last, self._seen = record, (record.iteration, record.iteration_s)
            self._durations_s.append(record.iteration_s)
            self._status.update(Text(self._text(self.last), no_wrap=True, overflow="ellipsis"))
            is_due = time.monotonic() - self._printed_s >= _PLAIN_INTERVAL_S
            if not self._console.is_terminal and (is_due or self.last.iteration >= self._iterations):
                self._print()

    def _text(self, record: IterationMetrics) -> str:
        parts = [f"iteration {record.iteration}/{self._iterations}", f"loss {record.lm_loss:.4f}"]
        parts.append(f"{record.tokens_per_s:,.0f} tokens/s")
        if record.layers:
            used = fmean(layer.load_max_over_mean for layer in record.layers)
            plain = fmean(layer.ep_load_max_over_mean for layer in record.layers)
            parts.append(f"load max/mean {used:.2f} (plain EP {plain:.2f})")
        left_s = max(self._iterations - record.iteration, 0) * fmean(self._durations_s)
        parts.append("ETA {}:{:02d}".format(*divmod(round(left_s), 60)))
        if self._saves and record.iteration >= self._iterations:
            parts.append("saving a checkpoint …")
        return "  ".join(parts)

    def _print(self) -> None:
        """Print the last iteration, once."""
        if self.last is not None and self._printed is not self.last:
            self._printed, self._printed_s = self.last, time.monotonic()
            self._console.print(self._text(self.last))


def printed_command(request: TrainRequest) -> str:
    """Return the shell commands of a run, without building, writing or starting anything.

    They work in an empty folder: the default data is built first, if it does not exist yet. Data that exists
    only on the machines of the run is not checked, and the first line says so.
    """
    config, folder = request.resolve(), request.folder
    refuse_non_folder(folder.path, "--out")
    if request.resume:
        folder.check(config.training, resume=True, overwrite=request.overwrite)
    before, data = planned_data(config, folder.path)
    command = rank_command(config, data, folder.path, request.resume)
    command.check(is_here=False)
    return before + command.shell_text()


def train(request: TrainRequest, console: Console) -> int:
    """Train on this machine, show the progress, and return the ranks' exit code or one of INTERRUPTIONS.

    Raises:
        ConfigurationError: The input is invalid. No rank was started, and no folder was made.
    """
    config, folder, resume = request.resolve(), request.folder, request.resume
    _check_startable(config)
    refuse_unwritable(folder.path, "--out")
    folder.check(config.training, resume, request.overwrite)
    if resume:
        folder.refuse_other(config)
    if (place := unbuilt_folder(config.data, folder.path)) is not None:
        _, planned = planned_data(config, folder.path)
        rank_command(config, planned, folder.path, resume).check(is_here=True)
        build_with_progress(console, [], place, config.data.tokenizer, config.data.vocab_size)
    data = read_data(config, folder.path)
    if data:
        own = config.data.model_copy(update={"path": data["data_path"].parent})
        config = config.model_copy(update={"data": own})
    command = rank_command(config, data, folder.path, resume)
    command.check(is_here=True)
    overrides = request.changed_settings()
    if request.overwrite and (aside := folder.move_aside()):
        console.print(f"{folder.path}: the run that was here is now {aside}")
    lock = run_lock.hold(folder.path, "--out")
    try:
        folder.create(config, overrides)
        console.print(f"{folder.path}: strategy {config.strategy.name}, log in {folder.log}")
        if resume and overrides:
            console.print(f"settings of earlier options are kept ({folder.overrides})")
        return _run(command, folder, lock, console)
    finally:
        run_lock.release(folder.path)


def _check_startable(config: RunConfig) -> None:
    """Raise a ConfigurationError if a run needs several machines, or a package that is not installed."""
    if config.parallelism.num_nodes > 1:
        raise ConfigurationError(
            f"parallelism.num_nodes {config.parallelism.num_nodes}: this command starts the ranks of one "
            "machine; use --dry-run and run the printed command on every machine"
        )
    for key in ("tensorboard", "tensorboard_dir"):
        if (asked := getattr(config.training, key)) and importlib.util.find_spec("tensorboard") is None:
            raise ConfigurationError(
                f"training.{key} {asked}: the package tensorboard is not installed; install it with `pip "
                "install tensorboard`, or remove the key"
            )


def _run(command: RankCommand, folder: RunFolder, lock: int, console: Console) -> int:
    """Run the ranks and say how they ended; this process holds the folder for them."""
    training, nproc = command.config.training, command.config.parallelism.nproc_per_node
    log_start = folder.log.stat().st_size if folder.log.exists() else 0
    iterations, saves = training.train_iters, training.save_checkpoints
    progress = TrainingProgress(folder.metrics, iterations, nproc, console, saves=saves)
    environment = {**command.environment(), run_lock.HELD_VARIABLE: str(folder.path.resolve())}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="megatron-fssdp-") as scratch,
            folder.log.open("ab") as log,
            progress,
        ):
            code = run_to_the_end(command.local(Path(scratch)), environment, log, progress.update, lock)
    except KeyboardInterrupt as interrupt:
        progress.update()  # the ranks may have recorded more since the last poll
        is_saved = saved_iteration(training.save or folder.checkpoints) is not None
        again = "continue with --resume" if is_saved else "no checkpoint yet, start again with --overwrite"
        code = exit_code_after(interrupt)
        folder.note_stop(progress.reached, f"interrupted by {INTERRUPTIONS[code]}")
        console.print(f"interrupted; all ranks have ended; {again}")
        return code
    if code != 0 or progress.last is None:
        reason = failure_reason(folder.log, log_start)
        # Without room for the log, the line that was found explains nothing.
        limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)  # -1: no limit
        if shutil.disk_usage(folder.path).free < _FULL_BYTES:
            reason = f"the disk of {folder.path} is full; free some space; {reason}"
        elif 0 <= limit_bytes <= folder.log.stat().st_size:
            reason = f"{folder.log} has the size that `ulimit -f` allows; raise that limit; {reason}"
        folder.note_stop(progress.reached, reason)
        console.print(f"error: training failed: {reason}", style="red")
        console.print(f"all output: {folder.log}")
        return code if code > 0 else 1
    if progress.reached < iterations:
        folder.note_stop(progress.reached, "an exit option asked for it")
        early = "the ranks stopped before the last iteration, as an exit option asked; the reason is in"
        console.print(f"{early} {folder.log}")
    beside = (training.tensorboard_dir or folder.path / "tensorboard").parent  # Megatron writes traces there.
    for trace in sorted((beside / "torch_profile").glob("rank-*.json.gz")):
        console.print(f"profiler's trace: {trace}; open it in https://ui.perfetto.dev")
    done = f"done: {progress.reached} iterations, loss {progress.last.lm_loss:.4f}"
    console.print(f"{done}; next: megatron-fssdp report {shlex.quote(str(folder.path))}")
    return 0
