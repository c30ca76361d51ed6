"""Runs torchrun to its end, ends all ranks when the user interrupts, and finds why ranks failed."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

_POLL_S = 0.2
_END_GRACE_S = 15.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)

# The message that this package's launcher prints for invalid input.
_PLUGIN_ERROR = re.compile(r"\[fssdp\] error(?: on rank \d+)?: (?P<message>.*)")
# torchrun's summary of the rank that failed first.
_ROOT_CAUSE = re.compile(
    r"Root Cause.*?rank\s*:\s*\d+ \(local_rank: (?P<rank>\d+)\)\s+exitcode\s*:\s*(?P<code>-?\d+)", re.DOTALL
)
# The last line of a traceback: an exception's name at the start of a line.
_EXCEPTION = re.compile(r"^(?P<name>(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)?)(?:: |$)")
# torchrun's own lines have no mark. They only state that a rank failed.
_RANK_MARK = re.compile(r"^\[[a-z_]+(?P<rank>\d+)\]:\s?(?:\[rank\d+\]:\s?)?")
_MAX_LOG_BYTES = 4 << 20


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
    """Run a command that starts ranks, and return its exit code. However this ends, no rank is left.

    Args:
        command: Words of the command line.
        environment: Environment variables in addition to those of this process.
        output: File for all output, or None for the output of this process.
        on_poll: Is called several times per second while the command runs, and once after.
        lock: File descriptor that the command inherits, or -1, for ranks that outlive this process.

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


def failure_reason(log: Path, start: int = 0) -> str:
    """Return the plugin's message, or the exception of the rank that failed first, or the last line.

    ``start`` is the position in the log, in bytes, at which the output of this start of the run begins.
    """
    with log.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(start, end - _MAX_LOG_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    if match := _PLUGIN_ERROR.search(text):
        return match["message"].strip()
    # The last line of each rank, and that of its last traceback, in the order of the first tracebacks.
    last_lines: dict[str, str] = {}
    reasons: dict[str, str] = {}
    in_traceback: set[str] = set()
    for line in text.splitlines():
        if not (mark := _RANK_MARK.match(line)) or not (content := line[mark.end() :]).strip(" ^~"):
            continue  # an empty line, or one that marks a place in the line above
        last_lines[mark["rank"]] = content.strip()
        if content.startswith("Traceback (most recent call last)"):
            in_traceback.add(mark["rank"])
        elif mark["rank"] in in_traceback and _EXCEPTION.match(content):
            in_traceback.remove(mark["rank"])
            reasons[mark["rank"]] = content.strip()
    if root := _ROOT_CAUSE.search(text):
        rank, code = root["rank"], int(root["code"])
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.Signals else f"signal {-code}"
            return f"rank {rank}: killed by {name}; last output: {last_lines.get(rank, 'none')}"
        return f"rank {rank}: {reasons.get(rank) or last_lines.get(rank) or f'exit code {code}'}"
    for rank, reason in (reasons or last_lines).items():
        return f"rank {rank}: {reason}"
    meaningful = [line.strip() for line in text.splitlines() if line.strip(" =-\t")]
    return meaningful[-1] if meaningful else "the ranks wrote nothing"
