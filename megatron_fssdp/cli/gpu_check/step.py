"""One step of a check: a command, its time limit, and the judgement of what it wrote."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class StepVerdict(StrEnum):
    """Result of a step."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Step:
    """A command that a check runs in a process of its own.

    Attributes:
        name: Name of the step, also of its log file, for example ``parity-fssdp-fp32``.
        title: What the step checks, for the page and for the progress.
        command: Words of the command line.
        limit_s: Seconds after which the step and all its processes are ended.
        environment: Environment variables in addition to those of this process.
        judge: Function that reads what the command wrote, and returns a problem or an empty text. It is
            called only if the exit code is 0.
        skipped: Why the step is not run; empty if it is run.
    """

    name: str
    title: str
    command: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    judge: Callable[[], str] | None = None
    skipped: str = ""


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        step: The step.
        verdict: Whether it passed, failed or was skipped.
        reason: Why it failed or was skipped, on one line; empty if it passed.
        seconds: How long it ran.
        exit_code: Exit code of its command; ``None`` if it was skipped or ended by the time limit.
        log: File with its whole output; ``None`` if it was skipped.
        log_end: Last lines of its output, if it failed.
    """

    step: Step
    verdict: StepVerdict
    reason: str = ""
    seconds: float = 0.0
    exit_code: int | None = None
    log: Path | None = None
    log_end: str = ""
