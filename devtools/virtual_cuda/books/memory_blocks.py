"""Keeps books on allocations: who uses which bytes of which storage, and when memory is given back."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_ROUNDING_BYTES = 512  # CUDA's caching allocator rounds sizes up to a multiple of this.


@dataclass(frozen=True)
class Access:
    """One use of bytes ``[begin, end)`` of a storage, by the operation of a stream or of the host (actor)."""

    begin: int
    end: int
    writes: bool
    actor: int
    number: int
    operation: str
    place: str


@dataclass(eq=False)
class Block:
    """One allocation."""

    storage: StorageWeakRef  # It expires when no tensor uses the storage any more.
    stream: int  # that was current at the allocation
    place: str
    num_bytes: int
    is_pinned: bool = False  # page-locked memory of the host, not memory of the device
    recorded: set[int] = field(default_factory=set)  # streams for which record_stream was called
    accesses: list[Access] = field(default_factory=list)  # that a later use may still conflict with
    last: dict[int, Access] = field(default_factory=dict)  # of each actor
    is_free: bool = False  # The memory was given back although the storage still exists (resize_(0)).

    def conflicts(self, access: Access, is_ordered: Callable[[int, int, int], bool]) -> Iterator[Access]:
        """Earlier uses of the same bytes that are not ordered before this one, of which one writes."""
        for earlier in self.accesses:
            overlaps = earlier.begin < access.end and access.begin < earlier.end
            is_conflict = overlaps and (access.writes or earlier.writes)
            if is_conflict and not is_ordered(access.actor, earlier.actor, earlier.number):
                yield earlier

    def add(self, access: Access) -> None:
        """Remember a use, and forget the uses that a later use can no longer conflict with alone."""
        self.accesses = [earlier for earlier in self.accesses if not _replaces(access, earlier)]
        self.accesses.append(access)
        self.last[access.actor] = access


def _replaces(access: Access, earlier: Access) -> bool:
    """Whether every conflict with an earlier use is also a conflict with the new one."""
    covers = access.begin <= earlier.begin and earlier.end <= access.end
    return covers and (access.writes or (not earlier.writes and earlier.actor == access.actor))


def storage_key(tensor: Tensor) -> int | None:
    """Key of a tensor's storage; None for tensors without a storage, such as fake or sparse tensors."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the byte after its last one."""
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    span = sum((n - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (span + 1) * size


class MemoryBlocks:
    """All allocations on the virtual device, and the page-locked ones of the host."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._undecided: dict[int, StorageWeakRef] = {}
        self.allocated_bytes = 0
        self.peak_bytes = 0

    def of(self, tensor: Tensor) -> Block | None:
        key = storage_key(tensor)
        return None if key is None else self._blocks.get(key)

    def of_storage(self, storage: torch.UntypedStorage) -> Block | None:
        return self._blocks.get(int(storage._cdata))

    def add(self, storage: torch.UntypedStorage, stream: int, place: str, *, is_pinned: bool = False) -> None:
        """Make a storage one of the device (or page-locked); a storage that already is stays as it is."""
        key = int(storage._cdata)
        self._undecided.pop(key, None)
        if key not in self._blocks:
            block = Block(StorageWeakRef(storage), stream, place, storage.nbytes(), is_pinned)
            self._blocks[key] = block
            self._count(block, 1)

    def leave_undecided(self, tensor: Tensor) -> None:
        """Note that a new tensor may be on the device; the first operator that uses it decides."""
        key = storage_key(tensor)
        if key is not None and key not in self._blocks:
            self._undecided[key] = StorageWeakRef(tensor.untyped_storage())

    def is_undecided(self, tensor: Tensor) -> bool:
        """Whether it is still open on which side a tensor is."""
        reference = self._undecided.get(storage_key(tensor) or 0)
        return reference is not None and not reference.expired()

    def replace(self, storage: torch.UntypedStorage, stream: int, place: str) -> None:
        del self._blocks[int(storage._cdata)]
        self.add(storage, stream, place)

    def give_back(self, block: Block) -> None:
        if not block.is_free:
            block.is_free = True
            self._count(block, -1)

    def take_expired(self) -> list[Block]:
        """Remove and return the blocks whose storage no tensor uses any more."""
        # Every operator asks for every storage, so this leaves out two functions of Python in torch.
        is_expired = torch.UntypedStorage._expired
        for key in [key for key, storage in self._undecided.items() if is_expired(storage.cdata)]:
            del self._undecided[key]
        expired = [key for key, block in self._blocks.items() if is_expired(block.storage.cdata)]
        return [self._blocks.pop(key) for key in expired]

    def _count(self, block: Block, sign: int) -> None:
        if not block.is_pinned:
            self.allocated_bytes += sign * -(-block.num_bytes // _ROUNDING_BYTES) * _ROUNDING_BYTES
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
