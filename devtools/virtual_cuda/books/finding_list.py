"""Collects the findings of a virtual device, each defect once."""

from devtools.virtual_cuda.books.code_place import code_place
from devtools.virtual_cuda.books.device_log import name_of
from devtools.virtual_cuda.books.findings import Finding, FindingKind
from devtools.virtual_cuda.books.memory_blocks import Access, Block


class FindingList:
    """The findings of a device, in the order in which they were found.

    One defect often shows in many operations of the same lines. The first one is reported.
    """

    def __init__(self) -> None:
        self._by_lines: dict[tuple[str, ...], Finding] = {}

    @property
    def all(self) -> tuple[Finding, ...]:
        return tuple(self._by_lines.values())

    def race(self, access: Access, earlier: Access, block: Block) -> None:
        told, place = _told(access), access.place
        self._add(Finding(FindingKind.RACE, told, place, _told(earlier), earlier.place, block.place))

    def freed_in_use(self, block: Block, access: Access, place: str) -> None:
        use = f"end of memory of {name_of(block.stream)} (record_stream or a wait is missing)"
        kind, told = FindingKind.FREED_IN_USE, _told(access)
        self._add(Finding(kind, use, place, told, access.place, block.place))

    def use_after_free(self, use: str, block: Block) -> Finding:
        finding = Finding(FindingKind.USE_AFTER_FREE, use, code_place(), memory_place=block.place)
        self._add(finding)
        return finding

    def wrong_tensor(self, kind: FindingKind, use: str) -> None:
        self._add(Finding(kind, use, code_place()))

    def _add(self, finding: Finding) -> None:
        self._by_lines.setdefault(finding.lines, finding)


def _told(access: Access) -> str:
    return f"{'write' if access.writes else 'read'} by {name_of(access.actor)} ({access.operation})"
