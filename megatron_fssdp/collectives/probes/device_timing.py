"""Measures how many seconds an action takes on its device."""

import time
from collections.abc import Callable

import torch


def elapsed_s(action: Callable[[], object], device: torch.device) -> float:
    """Seconds from the start of an action on an idle device until the device is idle again."""
    synchronize(device)
    started_s = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - started_s


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device is idle; do nothing on other devices, which do not run asynchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
