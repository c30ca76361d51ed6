"""What CUDA device arguments, streams and events mean on the CPU."""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_IDENTITIES = (torch.Tensor.cuda, torch.Tensor.pin_memory)
_CHANGED = frozenset({*_IDENTITIES, torch.Tensor.to, torch.Tensor.type})


def _is_accelerator(device: object) -> bool:
    if isinstance(device, (int, str, torch.device)) and not isinstance(device, bool):
        return isinstance(device, int) or str(device).startswith("cuda")
    return False


class CpuDeviceMode(TorchFunctionMode):
    """Replaces CUDA device arguments of all torch functions by the CPU while it is active."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not kwargs and func not in _CHANGED:  # Also attributes of tensors come here, so this is frequent.
            return func(*args)
        kwargs = dict(kwargs or {})
        if _is_accelerator(kwargs.get("device")):
            kwargs["device"] = _CPU
        if func in _IDENTITIES:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_accelerator(args[1]):
            args = (args[0], _CPU, *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers group parameters by this string. They compare it with
            # 'torch.cuda.FloatTensor' and similar names.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


class FinishedStream:
    """Replaces ``torch.cuda.Stream``: all work on this stream is done already, so nothing waits."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None:
        """Return at once."""

    wait_event = synchronize = wait_stream

    def record_event(self, event: "HostEvent | None" = None) -> "HostEvent":
        """Return the event, or a new one if none is given. All work before it is done."""
        return event or HostEvent()


class HostEvent:
    """Replaces ``torch.cuda.Event``: it records the time of the host, and nothing waits for it."""

    def __init__(self, *_: object, **__: object) -> None:
        self._time_s = 0.0

    def record(self, *_: object) -> None:
        """Record the current time."""
        self._time_s = time.perf_counter()

    def wait(self, *_: object) -> None:
        """Return at once."""

    synchronize = wait

    def query(self) -> bool:
        """Whether the work before the event is done; always true on the CPU."""
        return True

    def elapsed_time(self, end: "HostEvent") -> float:
        """Milliseconds from this event to a later event."""
        return (end._time_s - self._time_s) * 1e3


def inside_the_device_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward function that runs its Python code inside :class:`CpuDeviceMode`.

    Torch removes a function mode while one of its own functions runs, such as ``torch.autograd.backward``.
    Recomputed forward passes run inside it and need the mode.
    """

    @functools.wraps(original)
    def apply(self: Any, *args: Any) -> Any:
        if torch._C._len_torch_function_stack():
            return original(self, *args)
        with CpuDeviceMode():
            return original(self, *args)

    return apply
