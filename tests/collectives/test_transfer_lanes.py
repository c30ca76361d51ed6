import gc
import time

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from devtools.virtual_cuda import virtual_cuda
from megatron_fssdp.collectives.transfer_lanes import (
    PendingTransfer,
    ThreadLane,
    TransferTimer,
    advance_transfers,
    stream_lane,
)


def single_step(run):
    yield False
    run()


def test_exposed_time_never_exceeds_the_transfers_time():
    assert PendingTransfer(TransferTimer()).timer.seconds() == (0.0, 0.0)
    for waits, exposed_s in (
        ([(11.5, 12.0)], 0.5),
        ([(5.0, 12.0)], 2.0),  # waited for while other transfers of its lane ran
        ([(12.5, 12.0)], 0.0),  # on a stream that asked later than the end
    ):
        timer = TransferTimer(True, 0, 10.0, 12.0, waits)
        assert timer.seconds() == (2.0, exposed_s)
        assert timer.seconds(1.75) == (2.0, min(2.0, exposed_s + 1.75))


def test_an_exception_of_a_transfer_is_raised_by_its_wait_and_the_lane_goes_on():
    lane, order = ThreadLane(), list[str]()

    def broken():
        time.sleep(0.05)
        order.append("first")
        raise ConnectionError("peer went away")

    runs = broken, lambda: order.append("second")
    failed, following = (lane.submit(single_step(run), TransferTimer()) for run in runs)
    with pytest.raises(ConnectionError, match="peer went away"):
        failed.wait()
    assert failed.timer.seconds() == (0.0, 0.0)
    following.wait()
    assert following.timer.end is not None
    assert order == ["first", "second"]


def test_the_seconds_of_a_transfer_beside_an_interval():
    timer = TransferTimer(True, 0, 10.0, 14.0)
    intervals = ((8.0, 9.0), (8.0, 11.0), (11.0, 13.0), (13.0, 20.0), (9.0, 20.0), (14.0, 15.0))
    assert [timer.beside_s(*interval) for interval in intervals] == [0, 1, 2, 1, 4, 0]
    late = TransferTimer(True, 0, 10.0, 14.0, ends_at_wait=True)
    assert [timer.beside_s(9.0, 20.0) for timer in (late, TransferTimer())] == [0.0, 0.0]


def test_neither_lanes_nor_timers_keep_tensors_alive():
    lane, refs = ThreadLane(), list[StorageWeakRef]()

    def steps():
        tensor = torch.ones(100)
        refs.append(StorageWeakRef(tensor.untyped_storage()))
        yield False
        assert not refs[0].expired()
        del tensor

    pending = lane.submit(steps(), TransferTimer())
    pending.wait()
    lane.submit(single_step(dict), TransferTimer()).wait()
    gc.collect()
    assert refs[0].expired()
    assert pending.timer.seconds()[0] > 0


# Streams.


@pytest.fixture
def group():
    return type("Group", (), {})()  # only a key here


@pytest.fixture
def issued():
    """Batches in the order of their issue; "end" follows the last batch of a transfer."""
    return []


@pytest.fixture
def start(issued, group):
    """Submits a transfer by its name, number of batches and most batches at once, on a virtual device."""

    def steps(name, num_batches, lane):
        for batch in range(num_batches):
            assert torch.cuda.current_stream() == lane.stream
            assert not torch.is_grad_enabled()
            issued.append(f"{name}{batch}")
            yield batch + 1 < num_batches
        issued.append(f"{name} end")

    def submit(name, num_batches, at_once):
        lane = stream_lane(group, torch.device("cuda", 0))
        return lane.submit(steps(name, num_batches, lane), TransferTimer(), at_once, ())

    with virtual_cuda():
        yield submit


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_with_one_connection_each_point_issues_at_most_so_many_batches(group, issued, start, at_once):
    pending = start("a", 7, at_once)
    for points in range(1, 9):
        assert len(issued) == min(7, points * at_once)
        assert pending.has_batches == (len(issued) < 7)
        advance_transfers(group)
    # The end waits for the last batch on the lane's stream. It would hold up the one queue of the device.
    assert "a end" not in issued
    pending.wait()
    pending.wait()
    assert issued[-1] == "a end"


def test_a_transfer_begins_after_the_batches_of_the_transfers_before_it(group, issued, start):
    first, second = start("a", 3, 1), start("b", 2, 1)
    assert issued == ["a0", "a1"]
    for _ in range(3):
        advance_transfers(group)
    assert issued == ["a0", "a1", "a2", "b0", "b1"]
    third = start("c", 9, 1)
    second.wait()
    assert issued[5:] == ["c0", "a end", "b end"]
    first.wait()
    third.wait()
    assert issued[8:] == [f"c{batch}" for batch in range(1, 9)] + ["c end"]
