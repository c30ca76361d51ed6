"""Starts torchrun, follows the run and ends every rank when asked to."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from megatron_fssdp.cli.rank_command import RankCommand

_POLL_S = 0.2
_END_GRACE_S = 15.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


def run_ranks(command: RankCommand, log: Path, on_poll: Callable[[], None]) -> int:
    """Run to the end.

    Args:
        command: What to start.
        log: File that gets the output of all ranks, added to what is there.
        on_poll: Called several times a second meanwhile, and once after the end.

    Returns:
        The exit code.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM, after all ranks have ended.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-fssdp-") as scratch, log.open("ab") as output:
        return run_to_the_end(command.local(Path(scratch)), command.environment(), output, on_poll)


def run_to_the_end(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes] | None,
    on_poll: Callable[[], None],
) -> int:
    """Run a command that starts ranks; however this ends, none of them is left.

    Args:
        command: The command line.
        environment: Variables beyond those that are set.
        output: File for all output; ``None`` for this process's own.
        on_poll: Called several times a second meanwhile, and once after the end.

    Returns:
        The exit code.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM, after all ranks have ended.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the ranks in order
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    try:
        with _terminated_like_interrupted():
            while process.poll() is None:
                on_poll()
                time.sleep(_POLL_S)
    finally:
        end_group(process)
    on_poll()
    return process.returncode


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all it started: first politely (torchrun passes it on), then by force."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_GRACE_S)
    # The group outlives its leader while a rank hangs on.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_with_parent() -> None:
    """Have Linux send SIGTERM when this command is killed itself, so that no rank is left behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Within, SIGTERM raises KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
