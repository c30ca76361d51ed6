"""The result of one check of ``megatron-fssdp doctor``."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a finding means for a training on this machine."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; the user need not do anything."""
    PROBLEM = "problem"
    """Prevents a training; the user must fix it."""


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's report.

    Attributes:
        name: Name of the check, equal on all machines.
        found: What the check found on this machine.
        verdict: Whether this is fine, a note or a problem.
        advice: The next step, on one line. Every problem has one.

    Raises:
        ValueError: A problem has no advice, or the advice has several lines.
    """

    name: str
    found: str
    verdict: Verdict
    advice: str = ""

    def __post_init__(self) -> None:
        if self.verdict is Verdict.PROBLEM and not self.advice:
            raise ValueError(f"finding '{self.name}': got a problem without advice, wanted the next step")
        if "\n" in self.advice:
            raise ValueError(f"finding '{self.name}': got advice of several lines, wanted one")
