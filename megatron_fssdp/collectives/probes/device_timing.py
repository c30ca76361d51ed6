"""Seconds of an action on the device that it works on."""

import time
from collections.abc import Callable

import torch


def elapsed_s(action: Callable[[], object], device: torch.device) -> float:
    """Seconds from an idle device to an idle device again."""
    synchronize(device)
    started_s = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - started_s


def synchronize(device: torch.device) -> None:
    """Wait for the device, where it works on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
