"""Collects the findings of a virtual device, each defect once."""

from tests.support.virtual_cuda.books.code_place import code_place
from tests.support.virtual_cuda.books.findings import Finding, FindingKind
from tests.support.virtual_cuda.books.memory_blocks import Access, Block
from tests.support.virtual_cuda.books.stream_names import StreamNames


class FindingList:
    """The findings of a device, in the order in which they were found.

    One defect often shows in many operations of the same lines. The first one is reported.

    Args:
        names: Names of the device's streams.
    """

    def __init__(self, names: StreamNames) -> None:
        self._names = names
        self._by_lines: dict[tuple[str, ...], Finding] = {}

    @property
    def all(self) -> tuple[Finding, ...]:
        """All findings."""
        return tuple(self._by_lines.values())

    def race(self, access: Access, other: Access, block: Block) -> None:
        """Report two uses of the same bytes without an order."""
        told, place = self._told(access), access.place
        self._add(Finding(FindingKind.RACE, told, place, self._told(other), other.place, block.place))

    def freed_in_use(self, block: Block, access: Access, place: str) -> None:
        """Report memory that was given back while a stream used it.

        The place at which the end of a tensor is noticed depends on the operations that follow. Findings
        that differ only by this place are equal.
        """
        what = f"end of memory of {self._names.of(block.stream)} (record_stream or a wait is missing)"
        told = self._told(access)
        finding = Finding(FindingKind.FREED_IN_USE, what, place, told, access.place, block.place)
        self._add(finding, with_place=False)

    def use_after_free(self, what: str, block: Block) -> Finding:
        """Report the use of memory that was given back, and return the finding."""
        finding = Finding(FindingKind.USE_AFTER_FREE, what, code_place(), memory_place=block.place)
        self._add(finding)
        return finding

    def device_mix(self, what: str, argument: str) -> None:
        """Report a CPU tensor among CUDA tensors."""
        self._add(Finding(FindingKind.DEVICE_MIX, f"argument {argument!r} of {what}", code_place()))

    def in_nccl(self, kind: FindingKind, what: str) -> None:
        """Report a tensor that NCCL does not accept."""
        self._add(Finding(kind, what, code_place()))

    def _told(self, access: Access) -> str:
        verb = "write" if access.writes else "read"
        return f"{verb} by {self._names.of(access.actor)} ({access.what})"

    def _add(self, finding: Finding, *, with_place: bool = True) -> None:
        places = (finding.place if with_place else "", finding.other_place, finding.memory_place)
        lines = [place.split(" < ")[0] for place in places]
        self._by_lines.setdefault((finding.kind, *lines), finding)
