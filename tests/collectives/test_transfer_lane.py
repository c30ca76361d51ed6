"""Lanes run transfers in the background and measure their times."""

import threading
import time

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fssdp.collectives.transfer_lane import (
    FinishedTransfer,
    HostTimer,
    ThreadLane,
    TransferTiming,
)


def test_transfers_run_one_after_another_while_the_caller_goes_on() -> None:
    lane = ThreadLane("test")
    may_end = threading.Event()
    order: list[int] = []

    def first() -> dict[int, torch.Tensor]:
        may_end.wait(30)
        order.append(1)
        assert not torch.is_grad_enabled()
        return {1: torch.ones(2)}

    def second() -> dict[int, torch.Tensor]:
        order.append(2)
        return {}

    pending = [lane.submit(first), lane.submit(second)]
    assert order == [], "the caller waited"
    may_end.set()
    assert pending[1].wait() == {}
    assert torch.equal(pending[0].wait()[1], torch.ones(2))
    assert order == [1, 2]
    one, other = (transfer.timer for transfer in pending)
    assert 0 < one.begin_s <= one.end_s <= other.begin_s <= other.end_s


def test_only_the_time_spent_waiting_is_exposed() -> None:
    lane = ThreadLane("test")
    may_end = threading.Event()
    waited = lane.submit(lambda: {0: torch.ones(1)} if may_end.wait(30) else {})
    threading.Timer(0.05, may_end.set).start()
    waited.wait()
    timing = waited.timer.timing()
    ((begin_s, end_s),) = waited.timer.waits_s
    assert begin_s < waited.timer.end_s <= end_s
    assert 0 < timing.exposed_s <= timing.busy_s

    def short() -> dict[int, torch.Tensor]:
        time.sleep(0.02)
        return {}

    hidden = lane.submit(short)
    lane.submit(dict).wait()
    assert hidden.timer.timing().exposed_s == 0, "nothing has waited for it yet"
    hidden.wait()
    hidden.wait()
    assert hidden.timer.timing().busy_s >= 0.02
    assert [begin_s > hidden.timer.end_s for begin_s, _ in hidden.timer.waits_s] == [True, True]


def test_exposed_time_never_exceeds_the_transfers_time() -> None:
    assert FinishedTransfer({}).timer.timing() == TransferTiming(0.0, 0.0)
    timer = HostTimer()
    timer.begin_s, timer.end_s, timer.waits_s = 10.0, 12.0, [(11.5, 12.0)]
    assert timer.timing() == TransferTiming(2.0, 0.5)
    timer.waits_s = [(5.0, 12.0)]  # waited for while other transfers of its lane ran
    assert timer.timing() == TransferTiming(2.0, 2.0)


def test_an_exception_of_a_transfer_is_raised_by_its_wait_and_the_lane_goes_on() -> None:
    lane = ThreadLane("test")

    def broken() -> dict[int, torch.Tensor]:
        raise ConnectionError("peer went away")

    failed, next_one = lane.submit(broken), lane.submit(dict)
    with pytest.raises(ConnectionError, match="peer went away"):
        failed.wait()
    assert failed.timer.timing() == TransferTiming(0.0, 0.0)
    assert next_one.wait() == {}


def test_neither_lanes_nor_timers_keep_tensors_alive() -> None:
    lane = ThreadLane("test")
    refs: list[StorageWeakRef] = []

    def run() -> dict[int, torch.Tensor]:
        tensor = torch.ones(100)
        refs.append(StorageWeakRef(tensor.untyped_storage()))
        return {0: tensor}

    pending = lane.submit(run)
    timer = pending.timer
    pending.wait()
    lane.submit(dict).wait()
    assert not refs[0].expired()
    del pending
    assert refs[0].expired()
    assert timer.timing().busy_s > 0
