"""Runs a step in a process of its own, and ends all its processes at the time limit."""

import contextlib
import os
import re
import subprocess
import time
from pathlib import Path

import psutil

from megatron_fssdp.cli.gpu_check.step import Step, StepResult, StepVerdict
from megatron_fssdp.cli.ranks.rank_processes import end_group

_POLL_S = 0.1
_KILLED_S = 10.0
_LOG_END_LINES = 100
_LOG_END_CHARS = 16_000

EXIT_FINDINGS = 3
"""Exit code of the virtual devices' launcher if they found races or other faults."""

# torchrun's own exit code is 1, and its summary has the exit code of the rank.
_RANK_WITH_FINDINGS = re.compile(rf"exitcode\s*:\s*{EXIT_FINDINGS}\b")


def run_step(step: Step, logs: Path) -> StepResult:
    """Run a step, and judge it. A failing or hanging step raises nothing.

    Args:
        step: The step to run.
        logs: Folder for the log.
    """
    if step.skipped:
        return StepResult(step, StepVerdict.SKIPPED, step.skipped)
    log = logs / f"{step.name}.txt"
    started_s = time.monotonic()
    try:
        code = _exit_code(step, log)
    except OSError as error:
        log.write_text(f"{error}\n")
        return StepResult(step, StepVerdict.FAILED, f"cannot be started: {error}", 0.0, None, log)
    seconds = time.monotonic() - started_s
    reason = _reason(step, code, log)
    if not reason:
        return StepResult(step, StepVerdict.PASSED, "", seconds, code, log)
    return StepResult(step, StepVerdict.FAILED, reason, seconds, code, log, log_end(log))


def log_end(log: Path) -> str:
    """Return the last lines of a log.

    Args:
        log: The log file.
    """
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LOG_END_CHARS))
        text = file.read().decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-_LOG_END_LINES:])


def _reason(step: Step, code: int | None, log: Path) -> str:
    if code is None:
        return f"still running after {step.limit_s:.0f} s, its time limit; all its processes were ended"
    if code and (code == EXIT_FINDINGS or _RANK_WITH_FINDINGS.search(log_end(log))):
        return "the virtual devices report findings (exit code 3); the log has them"
    if code != 0:
        return f"exit code {code}" if code > 0 else f"killed by signal {-code}"
    if step.judge is None:
        return ""
    try:
        return step.judge()
    except Exception as error:  # What a step wrote may be damaged in any way.
        return f"its results cannot be read: {type(error).__name__}: {error}"


def _exit_code(step: Step, log: Path) -> int | None:
    """Run the command until it ends; return ``None`` if the time limit ended it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            step.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **step.environment},
            start_new_session=True,  # only this process gets Ctrl-C, and it then ends the step in order
        )
        end_s = time.monotonic() + step.limit_s
        try:
            while time.monotonic() < end_s:
                if process.poll() is not None:
                    return process.returncode
                time.sleep(_POLL_S)
            return None
        finally:
            _end(process)


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
