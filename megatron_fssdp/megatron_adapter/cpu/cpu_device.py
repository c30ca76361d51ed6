"""The CPU's meaning of CUDA device arguments, streams and events."""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _is_accelerator(device: object) -> bool:
    if isinstance(device, bool):
        return False
    return isinstance(device, int) or str(device).startswith("cuda")


class CpuDeviceMode(TorchFunctionMode):
    """Every CUDA device argument of every torch function means the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and kwargs["device"] is not None and _is_accelerator(kwargs["device"]):
            kwargs["device"] = _CPU
        if func in _IDENTITIES:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_device_argument(args[1]):
            args = (args[0], _CPU, *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers group parameters by comparing this string with
            # 'torch.cuda.FloatTensor' and its relatives.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


_IDENTITIES = (torch.Tensor.cuda, torch.Tensor.pin_memory)


def _is_device_argument(argument: object) -> bool:
    return isinstance(argument, (str, int, torch.device)) and _is_accelerator(argument)


class FinishedStream:
    """A stream on which everything has happened already."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, *_: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: "HostEvent | None" = None) -> "HostEvent":
        """The event, or a new one; all work before it is done."""
        return event or HostEvent()


class HostEvent:
    """An event that records host time."""

    def __init__(self, *_: object, **__: object) -> None:
        self._time_s = 0.0

    def record(self, *_: object) -> None:
        """Note the time."""
        self._time_s = time.perf_counter()

    def wait(self, *_: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always over."""
        return True

    def elapsed_time(self, end: "HostEvent") -> float:
        """Milliseconds from this event to a later one."""
        return (end._time_s - self._time_s) * 1e3


def inside_the_device_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """Python code of a backward pass sees the device mode as that of a forward pass does.

    Torch takes a mode off while one of its own functions runs. ``torch.autograd.backward``
    is such a function, and a recomputed forward runs inside it.
    """

    @functools.wraps(original)
    def apply(self: Any, *args: Any) -> Any:
        if torch._C._len_torch_function_stack():
            return original(self, *args)
        with CpuDeviceMode():
            return original(self, *args)

    return apply
