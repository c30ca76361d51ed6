"""Checks whether the installed Megatron has all seams that the plugin attaches to."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict
from megatron_fssdp.megatron_adapter.diagnosis.installed_packages import one_line
from megatron_fssdp.megatron_adapter.support.capabilities import Seam, absence, optional_seams, training_seams
from megatron_fssdp.megatron_adapter.support.tested_versions import pip_install

CHECK = "Megatron's seams"


@dataclass(frozen=True)
class MissingSeam:
    """A seam that the installed Megatron does not have.

    Attributes:
        seam: The missing seam.
        reason: Error from looking it up, on one line.
        is_optional: Whether only a single feature needs it.
    """

    seam: Seam
    reason: str
    is_optional: bool = False


@dataclass(frozen=True)
class Seams:
    """Seams that were looked up in the installed Megatron.

    Attributes:
        num_sought: Number of seams that were looked up.
        missing: Seams that were not found.
    """

    num_sought: int
    missing: tuple[MissingSeam, ...] = ()


def look_for_seams() -> Seams:
    """Look up all seams in the installed Megatron, which must be importable."""
    required, optional = training_seams(), optional_seams()
    missing = []
    for seam in (*required, *optional):
        reason: Exception | None
        try:
            reason = absence(seam)
        except Exception as raised:  # A module of Megatron may raise any error when it is imported.
            reason = raised
        if reason is not None:
            missing.append(MissingSeam(seam, one_line(reason), seam in optional))
    return Seams(len(required) + len(optional), tuple(missing))


def check_seams(seams: Seams | None) -> Sequence[Finding]:
    """Return one finding for the number of seams found, and one for each missing seam.

    Args:
        seams: Result of the look-up; ``None`` if Megatron cannot be imported.
    """
    if seams is None:
        return [Finding(CHECK, "not checked, because Megatron cannot be imported", Verdict.NOTE)]
    num_found = seams.num_sought - len(seams.missing)
    found = f"found {num_found} of {seams.num_sought} functions and classes that the plugin attaches to"
    findings = [Finding(CHECK, found, Verdict.OK)]
    return findings + [_missing(each) for each in seams.missing]


def _missing(missing: MissingSeam) -> Finding:
    seam = missing.seam
    name, found = f"seam {seam.path}", f"not in {seam.module} ({missing.reason})"
    use = f"here the plugin {seam.purpose}, for {seam.needed_by}"
    if missing.is_optional:
        return Finding(name, found, Verdict.NOTE, f"{use}; other runs do not need it")
    advice = f"{use}; no run starts without it: install a tested release: {pip_install('megatron-core')}"
    return Finding(name, found, Verdict.PROBLEM, advice)
