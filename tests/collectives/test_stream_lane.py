"""A lane of CUDA tensors issues the batches of its transfers at the points where they belong."""

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fssdp.collectives.transfer_lanes import (
    TransferTimer,
    advance_transfers,
    lane_stream,
    stream_lane,
)
from megatron_fssdp.megatron_adapter.cpu.cpu_device import FinishedStream, HostEvent

DEVICE = torch.device("cuda", 0)
Steps = Generator[None, None, dict[int, Tensor]]


class Group:
    """Stands for a process group, which is only a key here."""


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[FinishedStream]:
    """The current streams, innermost last, on a device whose work is always done."""
    current = [FinishedStream()]

    class Stream(FinishedStream):
        def __init__(self, *_: Any, **__: Any) -> None:
            """Take a device, as torch's streams do."""

    @contextmanager
    def entered(stream: FinishedStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: current[0])
    return current


@pytest.fixture
def group() -> dist.ProcessGroup:
    return cast(Any, Group())


@pytest.fixture
def issued() -> list[str]:
    """Batches in the order of their issue; "end" follows the last batch of a transfer."""
    return []


@pytest.fixture
def transfer(current: list[FinishedStream], issued: list[str]) -> Callable[..., Steps]:
    def steps(name: str, num_batches: int) -> Steps:
        for batch in range(num_batches):
            assert len(current) == 2, "not on the stream of transfers"
            assert not torch.is_grad_enabled()
            issued.append(f"{name}{batch}")
            yield
        issued.append(f"{name} end")
        return {0: torch.ones(1)}

    return steps


def test_with_many_connections_everything_is_issued_at_the_start(group, issued, transfer) -> None:
    lane = stream_lane(group, DEVICE)
    pending = lane.submit(transfer("a", 3), TransferTimer(), 3, None, [])
    assert issued == ["a0", "a1", "a2", "a end"]
    advance_transfers(group)
    assert pending.wait()[0].item() == 1
    assert issued == ["a0", "a1", "a2", "a end"]


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_with_one_connection_each_point_issues_at_most_so_many_batches(
    group, issued, transfer, at_once
) -> None:
    pending = stream_lane(group, DEVICE).submit(transfer("a", 7), TransferTimer(), 7, at_once, [])
    for points in range(1, 9):
        assert len(issued) == min(7, points * at_once)
        assert pending.num_issued == len(issued)
        advance_transfers(group)
    # The end waits for the last batch on the lane's stream. It would hold up the one queue of the device.
    assert "a end" not in issued
    pending.wait()
    assert issued[-1] == "a end"


def test_the_wait_issues_the_rest(group, issued, transfer) -> None:
    pending = stream_lane(group, DEVICE).submit(transfer("a", 5), TransferTimer(), 5, 2, [])
    advance_transfers(group)
    assert issued == ["a0", "a1", "a2", "a3"]
    pending.wait()
    pending.wait()
    assert issued[4:] == ["a4", "a end"]


def test_a_transfer_begins_after_the_batches_of_the_transfers_before_it(group, issued, transfer) -> None:
    lane = stream_lane(group, DEVICE)
    first = lane.submit(transfer("a", 3), TransferTimer(), 3, 1, [])
    second = lane.submit(transfer("b", 2), TransferTimer(), 2, 1, [])
    assert issued == ["a0", "a1"]
    for _ in range(3):
        advance_transfers(group)
    assert issued == ["a0", "a1", "a2", "b0", "b1"]
    third = lane.submit(transfer("c", 9), TransferTimer(), 9, 1, [])
    second.wait()
    assert issued[5:] == ["c0", "a end", "b end"]
    first.wait()
    third.wait()
    assert issued[8:] == [f"c{batch}" for batch in range(1, 9)] + ["c end"]


def test_an_error_of_a_batch_reaches_the_caller(group, current) -> None:
    def broken() -> Steps:
        yield
        raise ConnectionError("peer went away")

    pending = stream_lane(group, DEVICE).submit(broken(), TransferTimer(), 2, 1, [])
    with pytest.raises(ConnectionError, match="peer went away"):
        pending.wait()


def test_tensors_stay_until_the_wait_and_no_longer(group, transfer) -> None:
    tensor = torch.ones(100)
    memory = StorageWeakRef(tensor.untyped_storage())
    pending = stream_lane(group, DEVICE).submit(transfer("a", 1), TransferTimer(), 1, 1, [tensor])
    timer = pending.timer
    del tensor
    gc.collect()
    assert not memory.expired()
    pending.wait()
    assert memory.expired()
    assert timer.timing().busy_s >= timer.timing().exposed_s >= 0


class Touched:
    """A tensor that notes the streams on which its use is recorded."""

    def __init__(self) -> None:
        self.streams: list[FinishedStream] = []

    def record_stream(self, stream: FinishedStream) -> None:
        self.streams.append(stream)


def test_the_use_of_memory_on_other_streams_than_the_default_one_is_recorded(
    group, current, transfer
) -> None:
    """Megatron's combined 1F1B schedule starts a transfer on one stream and waits for it on another one."""
    lane, ordinary, combined = stream_lane(group, DEVICE), Touched(), Touched()
    lane.submit(transfer("a", 0), TransferTimer(), 0, None, cast(Any, [ordinary])).wait()
    assert ordinary.streams == []
    with torch.cuda.stream(FinishedStream()):
        pending = lane.submit(transfer("b", 0), TransferTimer(), 0, None, cast(Any, [combined]))
    pending.wait()
    assert combined.streams == [current[0]]


def test_streams_are_made_once_for_each_use_and_group(group: dist.ProcessGroup, current: Any) -> None:
    made = lane_stream("counts", group, DEVICE)
    assert lane_stream("counts", group, DEVICE) is made
    assert stream_lane(group, DEVICE).stream is lane_stream("transfers", group, DEVICE) is not made
    assert lane_stream("counts", cast(Any, Group()), DEVICE) is not made
