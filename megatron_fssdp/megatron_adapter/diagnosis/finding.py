"""What one check found."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a finding means for a training on this machine."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing has to be done."""
    PROBLEM = "problem"
    """Has to be put right."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        name: What was looked at; the same on every machine.
        found: What is there.
        verdict: What that means.
        advice: The next step, on one line; every problem has one.
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
