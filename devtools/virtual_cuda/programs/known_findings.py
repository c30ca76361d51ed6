"""Findings in Megatron's own code that are known and harmless, each with its file and the reason.

The table explains findings; it does not remove them from the list of a device. A finding that no row explains
is a defect until someone shows that it is harmless.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from devtools.virtual_cuda.books.findings import Finding, FindingKind


@dataclass(frozen=True)
class KnownFinding:
    """A finding that Megatron's code causes on every device."""

    kind: FindingKind
    file: str  # as in megatron/core/…
    operation: str  # the operator of that file which takes part in the finding
    reason: str
    # The finding is about memory of a stream that this file makes, wherever the memory is used. The operation
    # is then the name of the stream that uses it.
    of_stream: bool = False

    def explains(self, finding: Finding) -> bool:
        """Whether the finding is this one: the operator and its place, or the stream, are Megatron's."""
        if finding.kind is not self.kind:
            return False
        if self.of_stream:
            is_of_stream = f"memory of the stream made at [{self.file}:" in finding.use
            return is_of_stream and f" by {self.operation} (" in finding.other_use
        sides = [(finding.use, finding.place), (finding.other_use, finding.other_place)]
        return any(f"({self.operation})" in use and place.startswith(f"{self.file}:") for use, place in sides)


KNOWN_IN_MEGATRON = (
    KnownFinding(
        FindingKind.FREED_IN_USE,
        "megatron/core/distributed/param_and_grad_buffer.py",
        "copy_",
        "DDP is built on a side stream. It copies parameters of the default stream into its buffer there and "
        "gives their old memory back without record_stream. The default stream waits for the side stream "
        "before it gets its next work, so nothing can use the memory earlier.",
    ),
    KnownFinding(
        FindingKind.RACE,
        "megatron/core/transformer/moe/moe_utils.py",
        "read by the host",
        "Megatron's dispatcher makes a NumPy view of page-locked memory while the copy to it runs, and reads "
        "the view's numbers only after it has waited for the copy.",
    ),
    KnownFinding(
        FindingKind.FREED_IN_USE,
        "megatron/core/transformer/moe/shared_experts.py",
        "the default stream",
        "With --moe-shared-expert-overlap, the default stream reads memory of the shared experts' stream, "
        "which is given back without record_stream. Their stream can get the memory again only for its next "
        "work. In a forward pass that work begins with pre_forward_comm, which waits for the default "
        "stream; in a backward pass autograd waits for the gradient from there. Reads in the backward pass "
        "show only here, where all of it runs on the default stream: on a GPU autograd runs these operators "
        "on the shared experts' own stream.",
        of_stream=True,
    ),
)


def explained(
    findings: Iterable[Finding], known: Iterable[KnownFinding] = KNOWN_IN_MEGATRON
) -> tuple[list[Finding], list[tuple[Finding, KnownFinding]]]:
    """Divide findings into those that no row of a table explains, and those with the row that does."""
    rows, unknown, with_reason = tuple(known), [], []
    for finding in findings:
        row = next((row for row in rows if row.explains(finding)), None)
        if row is None:
            unknown.append(finding)
        else:
            with_reason.append((finding, row))
    return unknown, with_reason
