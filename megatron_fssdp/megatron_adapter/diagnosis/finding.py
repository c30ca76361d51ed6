"""The result of one check of ``megatron-fssdp doctor``."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a finding means for a training on this machine."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's report: the name of a check, and what it found on this machine."""

    name: str
    found: str
    verdict: Verdict = Verdict.OK
    advice: str = ""  # the next step, on one line; every problem has one

    def __post_init__(self) -> None:
        if "\n" in self.advice or (self.verdict is Verdict.PROBLEM and not self.advice):
            raise ValueError(f"finding '{self.name}': got advice {self.advice!r}, wanted one line of advice")


def note(name: str, found: str, advice: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(name, found, Verdict.NOTE, advice)


def problem(name: str, found: str, advice: str) -> Finding:
    """Return a finding that prevents a training."""
    return Finding(name, found, Verdict.PROBLEM, advice)
