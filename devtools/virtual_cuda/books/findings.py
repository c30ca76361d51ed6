"""What a virtual device reports: findings, and the log of what happened on the device."""

from dataclasses import dataclass
from enum import StrEnum


class FindingKind(StrEnum):
    RACE = "race between streams"
    FREED_IN_USE = "memory given back while a stream may still use it"
    USE_AFTER_FREE = "use of memory that was given back"
    DEVICE_MIX = "CPU tensor among CUDA tensors"
    NCCL_CPU = "NCCL call with a CPU tensor"
    NCCL_NOT_CONTIGUOUS = "NCCL call with a tensor that is not contiguous"


@dataclass(frozen=True)
class Finding:
    """A defect that a virtual device has found: what showed it, and what conflicts with it, if anything.

    Both are named with their streams and their places in the code, as ``file:line``; ``memory_place`` is
    that of the allocation.
    """

    kind: FindingKind
    use: str
    place: str
    other_use: str = ""
    other_place: str = ""
    memory_place: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """The kind and the innermost lines, which all findings of one defect share, whoever calls them."""
        # The place at which the end of a tensor is noticed depends on the operations that follow.
        place = "" if self.kind is FindingKind.FREED_IN_USE else self.place
        places = (place, self.other_place, self.memory_place)
        return (self.kind, *(place.split(" < ")[0] for place in places))

    def __str__(self) -> str:
        text = f"{self.kind}: {self.use} at [{self.place}]"
        if self.other_use:
            text += f" conflicts with {self.other_use} at [{self.other_place}]"
        if self.memory_place:
            text += f"; the memory was allocated at [{self.memory_place}]"
        return text


class EventKind(StrEnum):
    OPERATOR = "operator"
    COLLECTIVE = "collective"
    P2P_BATCH = "P2P batch"
    HOST_SYNC = "host synchronization"
    STREAM_WAIT = "stream wait"
    STREAM_MADE = "stream made"
    RECORD_STREAM = "record_stream"
    MARK = "mark"


@dataclass(frozen=True)
class DeviceEvent:
    """One entry in the log of a virtual device, which is in the order in which the host issued the work.

    ``place`` is that in the code, as ``file:line``, with callers in the plugin. Bytes are those of the sent
    and received tensors of a collective or of a batch of messages.
    """

    kind: EventKind
    name: str
    stream: str
    place: str
    num_bytes: int = 0
    num_messages: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.name} on {self.stream} at [{self.place}]"
