"""Moments on the clock of a device: seconds of the host for CPUs, events of the current stream for CUDA."""

import time

import torch

Moment = float | torch.cuda.Event
"""Seconds of ``time.perf_counter``, or a CUDA event that the device reaches in its own time."""


def now(is_cuda: bool) -> Moment:
    """The present moment. On CUDA, it costs one event and no wait of the host."""
    if not is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Moment, end: Moment) -> float:
    """The seconds between two moments of one clock. On CUDA, the host waits until both are reached."""
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin
    begin.synchronize()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
