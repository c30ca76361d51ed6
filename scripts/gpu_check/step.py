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

_POLL_S = 0.1
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
    verdict: str = "not run"  # passed, failed or skipped
    reason: str = ""  # why it failed or was skipped, on one line
    seconds: float = 0.0

    def failed(self, reason: str) -> "Step":
        """Return this step as failed."""
        return replace(self, verdict="failed", reason=reason)

    def run(self, logs: Path) -> "Step":
        """Run the command, unless it is skipped, and return this step with its outcome. Nothing is raised."""
        if self.verdict == "skipped":
            return self
        log, started_s = logs / f"{self.name}.txt", time.monotonic()
        try:
            code = self._exit_code(log)
        except OSError as error:
            log.write_text(f"{error}\n")
            return self.failed(f"cannot be started: {error}")
        done = replace(self, verdict="passed", seconds=time.monotonic() - started_s)
        if code is None:
            return done.failed(f"still running after {self.limit_s:.0f} s, its time limit; it was ended")
        if code and (code == 3 or _FINDINGS.search(log_end(log))):
            return done.failed("the virtual devices report findings (exit code 3); the log has them")
        if code == 0:
            return done
        said = [line.strip() for line in log_end(log).splitlines() if line.strip()]
        end = f"; its last line: {said[-1][:200]}" if said else ""
        return done.failed((f"exit code {code}" if code > 0 else f"killed by signal {-code}") + end)

    def _exit_code(self, log: Path) -> int | None:
        """Run the command until it ends; return ``None`` if the time limit ended it."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "150", **self.environment},
                start_new_session=True,  # only the check gets Ctrl-C, and it then ends the step in order
            )
            end_s = time.monotonic() + self.limit_s
            try:
                while time.monotonic() < end_s:
                    if process.poll() is not None:
                        return process.returncode
                    time.sleep(_POLL_S)
                return None
            finally:
                _end(process)


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
