"""The result of one check of ``megatron-fssdp doctor``."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's report: the name of a check, and what it found on this machine."""

    name: str
    found: str
    verdict: Literal["ok", "note", "problem"] = "ok"
    advice: str = ""  # the next step, on one line; every problem has one


def note(name: str, found: str, advice: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(name, found, "note", advice)


def problem(name: str, found: str, advice: str) -> Finding:
    """Return a finding that prevents a training."""
    return Finding(name, found, "problem", advice)
