"""Runs torchrun to its end, and ends all ranks when the user interrupts."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import IO

_POLL_S = 0.2
_END_GRACE_S = 15.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


class Terminated(KeyboardInterrupt):
    """This process got SIGTERM. All ranks are ended as after Ctrl-C."""


def exit_code_after(interrupt: KeyboardInterrupt) -> int:
    """Return the exit code that shells give to a process which the same signal ends: 128 + its number."""
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


def run_to_the_end(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes] | None = None,
    on_poll: Callable[[], None] = lambda: None,
    lock: int = -1,
) -> int:
    """Run a command that starts ranks. When this function ends for any reason, no rank is left.

    Args:
        command: Words of the command line.
        environment: Environment variables in addition to those of this process.
        output: File for all output, or None for the output of this process.
        on_poll: Is called several times per second while the command runs, and once after.
        lock: File descriptor that the command inherits, or -1, for ranks that outlive this process.

    Returns:
        The exit code of the command.

    Raises:
        KeyboardInterrupt: This process got Ctrl-C, or SIGTERM (:class:`Terminated`). All ranks have ended.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        start_new_session=True,  # only this process gets Ctrl-C, and it then ends the ranks in order
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        pass_fds=() if lock < 0 else (lock,),
    )
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        while process.poll() is None:
            on_poll()
            time.sleep(_POLL_S)
    finally:
        signal.signal(signal.SIGTERM, previous)
        end_group(process)
    on_poll()
    return process.returncode


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all processes that it started: first with SIGTERM, then with SIGKILL.

    torchrun passes SIGTERM on to its ranks.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_GRACE_S)
    # The process group still exists after its leader has ended, as long as one rank hangs.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_with_parent() -> None:
    """Ask Linux to send SIGTERM to the ranks' process if this process is killed, so that no rank is left."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
