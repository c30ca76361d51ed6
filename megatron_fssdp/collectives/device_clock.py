"""Moments on the clock of a device: seconds of the host for CPUs, events of the current stream for CUDA."""

import time
from collections.abc import Callable
from typing import cast

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
    if isinstance(begin, float):
        return cast(float, end) - begin
    end = cast(torch.cuda.Event, end)
    begin.synchronize()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def elapsed_s(action: Callable[[], object], device: torch.device) -> float:
    """Seconds from the start of an action on an idle device until the device is idle again."""
    started_s = synchronized_s(device)
    action()
    return synchronized_s(device) - started_s


def synchronized_s(device: torch.device | None = None) -> float:
    """The time of the host after all work of a device; by default of the present CUDA device, if any."""
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
