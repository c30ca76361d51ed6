"""Whether the installed Megatron has what the plugin hangs on."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict
from megatron_fssdp.megatron_adapter.diagnosis.installed_packages import one_line
from megatron_fssdp.megatron_adapter.support.capabilities import Seam, absence, optional_seams, training_seams
from megatron_fssdp.megatron_adapter.support.tested_versions import pip_install

CHECK = "Megatron's seams"


@dataclass(frozen=True)
class MissingSeam:
    """A place that the installed Megatron does not have.

    Attributes:
        seam: The place.
        reason: Why it was not found.
        is_optional: Whether runs that do not ask for its feature do without.
    """

    seam: Seam
    reason: str
    is_optional: bool = False


@dataclass(frozen=True)
class Seams:
    """What looking for all places gave.

    Attributes:
        num_sought: Places that were looked for.
        missing: Those that are not there.
    """

    num_sought: int
    missing: tuple[MissingSeam, ...] = ()


def look_for_seams() -> Seams:
    """Import what the plugin hangs on; Megatron has to be importable."""
    required, optional = training_seams(), optional_seams()
    missing = []
    for seam in (*required, *optional):
        reason: Exception | None
        try:
            reason = absence(seam)
        except Exception as raised:  # a module of Megatron that fails in another way
            reason = raised
        if reason is not None:
            missing.append(MissingSeam(seam, one_line(reason), seam in optional))
    return Seams(len(required) + len(optional), tuple(missing))


def check_seams(seams: Seams | None) -> Sequence[Finding]:
    """One finding for all that is there, and one for each place that is not.

    Args:
        seams: What was found; ``None`` if there is no Megatron to look at.
    """
    if seams is None:
        return [Finding(CHECK, "not looked for: Megatron cannot be imported", Verdict.NOTE)]
    num_found = seams.num_sought - len(seams.missing)
    findings = [Finding(CHECK, f"{num_found} of {seams.num_sought} are there", Verdict.OK)]
    return findings + [_missing(each) for each in seams.missing]


def _missing(missing: MissingSeam) -> Finding:
    seam = missing.seam
    name, found = f"seam {seam.path}", f"not in {seam.module} ({missing.reason})"
    use = f"there the plugin {seam.purpose}, for {seam.needed_by}"
    if missing.is_optional:
        return Finding(name, found, Verdict.NOTE, f"{use}; other runs do without it")
    return Finding(
        name, found, Verdict.PROBLEM, f"{use}; no run starts without it: {pip_install('megatron-core')}"
    )
