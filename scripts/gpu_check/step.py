"""One step of a check: a command in a process of its own, with a time limit."""

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from megatron_fssdp.launch.rank_processes import end_group

_KILLED_S = 10.0
_LOG_END_CHARS = 6_000

# Exit code of the virtual devices' launcher if they found races or other faults. torchrun's own exit code is
# 1, and its summary has that of the rank.
_FINDINGS = re.compile(r"exitcode\s*:\s*3\b")


@dataclass(frozen=True)
class Step:
    """A command of a check, and what became of it."""

    name: str  # also of the log file
    command: tuple[str, ...]
    limit_s: float  # after which the command and all its processes are ended
    environment: Mapping[str, str] = field(default_factory=dict)
    has_company: bool = False  # whether it may run beside its neighbours
    verdict: str = "not run"  # passed, failed or skipped
    reason: str = ""  # why it failed or was skipped, on one line
    seconds: float = 0.0

    def failed(self, reason: str) -> "Step":
        """Return this step as failed."""
        return replace(self, verdict="failed", reason=reason)

    def start(self, logs: Path) -> "Running":
        """Start the command, unless the step is skipped. Nothing is raised."""
        return Running(self, logs / f"{self.name}.txt")


class Running:
    """A step whose command runs. The caller asks for its end until it has ended, or ends it."""

    def __init__(self, step: Step, log: Path) -> None:
        self._step, self._log, self._started_s = step, log, time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        if step.verdict == "skipped":
            return
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    step.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "150", **step.environment},
                    start_new_session=True,  # only the check gets Ctrl-C, and it then ends the step in order
                )
        except OSError as error:
            log.write_text(f"{error}\n")
            self._step = step.failed(f"cannot be started: {error}")

    def ended(self) -> Step | None:
        """Return the step with its outcome, or ``None`` while it runs. Its time limit ends it."""
        if self._process is None:
            return self._step
        code, seconds = self._process.poll(), time.monotonic() - self._started_s
        if code is None and seconds < self._step.limit_s:
            return None
        self.end()
        done = replace(self._step, verdict="passed", seconds=seconds)
        if code is None:
            return done.failed(f"still running after {done.limit_s:.0f} s, its time limit; it was ended")
        if code and (code == 3 or _FINDINGS.search(log_end(self._log))):
            return done.failed("the virtual devices report findings (exit code 3); the log has them")
        if code == 0:
            return done
        said = [line.strip() for line in log_end(self._log).splitlines() if line.strip()]
        end = f"; its last line: {said[-1][:200]}" if said else ""
        return done.failed((f"exit code {code}" if code > 0 else f"killed by signal {-code}") + end)

    def end(self) -> None:
        """End the command and all its processes."""
        if self._process is not None:
            _end(self._process)


def log_end(log: Path) -> str:
    """Return the last lines of a log; empty without a log."""
    return log.read_text(errors="replace")[-_LOG_END_CHARS:] if log.exists() else ""


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and its descendants. torchrun starts its ranks in sessions of their own."""
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
    end_group(process)
    for descendant in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()
    psutil.wait_procs(descendants, timeout=_KILLED_S)
