"""The books of a virtual device, without tensors, streams or ranks."""

import torch

from tests.support.virtual_cuda.books.memory_blocks import Access, Block, MemoryBlocks
from tests.support.virtual_cuda.books.stream_order import DEFAULT_STREAM, HOST, StreamOrder

SIDE = 1


def order() -> StreamOrder:
    found = StreamOrder()
    found.add_stream(SIDE)
    return found


def test_streams_are_not_ordered_until_one_waits() -> None:
    books = order()
    number = books.launch(DEFAULT_STREAM)
    books.launch(SIDE)
    assert not books.is_ordered(SIDE, DEFAULT_STREAM, number)
    books.wait(SIDE, books.snapshot(DEFAULT_STREAM))
    assert books.is_ordered(SIDE, DEFAULT_STREAM, number)
    assert not books.is_ordered(DEFAULT_STREAM, SIDE, 2)


def test_waits_are_transitive() -> None:
    books, third = order(), 2
    books.add_stream(third)
    number = books.launch(DEFAULT_STREAM)
    books.wait(SIDE, books.snapshot(DEFAULT_STREAM))
    books.launch(SIDE)
    books.wait(third, books.snapshot(SIDE))
    assert books.is_ordered(third, DEFAULT_STREAM, number)


def test_what_the_host_has_awaited_is_before_all_that_it_launches_later() -> None:
    books = order()
    number = books.launch(SIDE)
    assert not books.is_ordered(HOST, SIDE, number)
    books.wait(HOST, books.snapshot(SIDE))
    books.launch(DEFAULT_STREAM)
    assert books.is_ordered(DEFAULT_STREAM, SIDE, number)


def test_a_stream_that_is_made_after_a_wait_of_the_host_is_ordered() -> None:
    books, third = order(), 2
    number = books.launch(SIDE)
    books.wait_for_all_streams()
    books.add_stream(third)
    assert books.is_ordered(third, SIDE, number)


def test_recorded_streams_delay_the_reuse_of_memory() -> None:
    books = order()
    number = books.launch(SIDE)
    assert books.completed_before_reuse(DEFAULT_STREAM, set()).get(SIDE, 0) < number
    assert books.completed_before_reuse(DEFAULT_STREAM, {SIDE})[SIDE] == number


def access(begin: int, end: int, actor: int, *, writes: bool) -> Access:
    return Access(begin, end, writes, actor, 1, "kernel", "here")


def conflicts(*accesses: Access) -> list[Access]:
    """Conflicts of the last access with the earlier ones, if nothing is ordered."""
    storage = torch.empty(8).untyped_storage()
    block = MemoryBlocks().add(storage, DEFAULT_STREAM, "here")
    for one in accesses[:-1]:
        block.add(one)
    return list(block.conflicts(accesses[-1], lambda actor, other, number: actor == other))


def test_only_overlapping_uses_of_which_one_writes_conflict() -> None:
    write, read = access(0, 8, 0, writes=True), access(0, 8, 0, writes=False)
    assert conflicts(write, access(4, 12, SIDE, writes=False)) == [write]
    assert conflicts(read, access(4, 12, SIDE, writes=True)) == [read]
    assert not conflicts(read, access(4, 12, SIDE, writes=False))
    assert not conflicts(write, access(8, 12, SIDE, writes=True))
    assert not conflicts(write, access(0, 8, 0, writes=True))


def test_a_use_is_forgotten_only_when_a_later_one_covers_it() -> None:
    first, second = access(0, 8, 0, writes=True), access(8, 16, 0, writes=True)
    assert conflicts(first, second, access(0, 16, SIDE, writes=False)) == [first, second]
    covering = access(0, 16, 0, writes=True)
    assert conflicts(first, second, covering, access(0, 16, SIDE, writes=False)) == [covering]
    reads = [access(0, 8, actor, writes=False) for actor in (0, SIDE)]
    assert conflicts(*reads, access(0, 8, 2, writes=True)) == reads


def test_blocks_follow_the_life_of_their_storage() -> None:
    memory, tensor = MemoryBlocks(), torch.empty(200)
    block = memory.add(tensor.untyped_storage(), DEFAULT_STREAM, "here")
    assert memory.of(tensor[3:]) is block, "views have the block of their storage"
    assert memory.allocated_bytes == 1024, "sizes are rounded up as in CUDA's allocator"
    assert not memory.take_expired()
    del tensor
    assert memory.take_expired() == [block]
    memory.give_back(block)
    assert (memory.allocated_bytes, memory.peak_bytes) == (0, 1024)
    assert isinstance(block, Block)
