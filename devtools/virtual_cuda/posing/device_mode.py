"""Gives device arguments, moves between devices and tensor factories their meaning on the virtual device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from devtools.virtual_cuda.books.stream_order import HOST
from devtools.virtual_cuda.books.virtual_device import VirtualDevice
from devtools.virtual_cuda.posing.operator_mode import copied_between

_CPU = torch.device("cpu")
_MADE_FROM_HOST_DATA = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
_ONLY_RESERVES = {torch.empty, torch.empty_like, torch.empty_strided}
_ONLY_RESERVES |= {Tensor.new_empty, Tensor.new_empty_strided}


def is_cuda_device(device: object) -> bool:
    if device is None or isinstance(device, bool):
        return False
    return isinstance(device, int) or str(device).startswith("cuda")


def plain_copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor that is made without being noted."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.detach().clone()


class DeviceMode(TorchFunctionMode):
    """Redirects what torch functions ask of CUDA devices to the CPU, and notes it on the virtual device."""

    def __init__(self, books: VirtualDevice) -> None:
        super().__init__()
        self.books = books
        self._special: dict[Any, Callable[..., Any]] = {
            Tensor.to: self._to,
            Tensor.cuda: self._cuda,
            Tensor.cpu: self._cpu,
            Tensor.tolist: self._tolist,
            Tensor.numpy: self._numpy,
            Tensor.pin_memory: self._pin_memory,
            Tensor.is_pinned: self._is_pinned,
            Tensor.type: self._type,
            Tensor.__deepcopy__: self._deepcopy,
            Tensor.__repr__: self._repr,
            Tensor.record_stream: self._record_stream,
            Tensor.get_device: self._get_device,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        special = self._special.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if any(isinstance(argument, Tensor) for argument in args):
            return self._call(func, args, kwargs)
        before, self.books.host_factory = self.books.host_factory, True
        try:
            return self._call(func, args, kwargs)
        finally:
            self.books.host_factory = before

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, which may make a tensor on a device of the caller's choice."""
        device, pinned = kwargs.get("device"), bool(kwargs.get("pin_memory"))
        on_cuda = is_cuda_device(device)
        if not on_cuda and not pinned and (device is None or torch.device(device).type != "cpu"):
            return func(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = _CPU
        if on_cuda:
            return self._pose(func, func(*args, **kwargs))
        with _disable_current_modes():
            outputs = func(*args, **kwargs)
        if pinned:
            for tensor in pytree.tree_leaves(outputs):
                self.books.allocate(tensor, is_pinned=True)
        return outputs

    def _pose(self, func: Any, outputs: Any) -> Any:
        books = self.books
        for tensor in pytree.tree_leaves(outputs):
            if isinstance(tensor, Tensor) and not books.holds(tensor):
                books.allocate(tensor)
                if func not in _ONLY_RESERVES and tensor.numel():
                    books.launch(getattr(func, "__name__", "factory"), [], [tensor])
                    if func in _MADE_FROM_HOST_DATA:
                        books.host_sync("copy to the device")
        return outputs

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        other, copies = kwargs.get("other", args[0] if args else None), kwargs.pop("copy", False)
        if isinstance(other, int) and not isinstance(other, bool):
            args = (torch.device("cuda", other), *args[1:])
        with torch._C.DisableTorchFunction():
            device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if isinstance(other, Tensor):
            device = self.books.device if self.books.holds(other) else _CPU
        if device is not None:
            tensor = self._moved(tensor, device, non_blocking=non_blocking)
        given = {"dtype": dtype, "memory_format": memory_format, "copy": copies or None}
        rest: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return Tensor.to(tensor, **rest) if rest else tensor

    def _cuda(self, tensor: Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> Tensor:
        return self._moved(tensor, self.books.device, non_blocking=non_blocking)

    def _cpu(self, tensor: Tensor, **_: Any) -> Tensor:
        return self._moved(tensor, _CPU, non_blocking=False)

    def _moved(self, tensor: Tensor, device: Any, *, non_blocking: bool) -> Tensor:
        if is_cuda_device(device) == self.books.holds(tensor):
            return tensor
        moved: Tensor = _Move.apply(tensor, self.books, non_blocking)
        return moved

    def _tolist(self, tensor: Tensor) -> Any:
        return Tensor.tolist(self._read_by_host(tensor))

    def _numpy(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.books.holds(tensor):
            raise TypeError(
                "can't convert cuda device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
                "memory first."
            )
        return Tensor.numpy(self._read_by_host(tensor), *args, **kwargs)

    def _read_by_host(self, tensor: Tensor) -> Tensor:
        if self.books.holds(tensor):
            return self._cpu(tensor.detach())
        if self.books.holds_pinned(tensor):
            self.books.launch("read by the host", [tensor], actor=HOST, kind=None)
        return tensor

    def _pin_memory(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.books.holds_pinned(tensor):
            return tensor
        pinned = plain_copy(tensor)
        self.books.allocate(pinned, is_pinned=True)
        return pinned

    def _is_pinned(self, tensor: Tensor, *_: Any, **__: Any) -> bool:
        return self.books.holds_pinned(tensor)

    def _type(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            name: str = Tensor.type(tensor)
            return name.replace("torch.", "torch.cuda.", 1) if self.books.holds(tensor) else name
        if isinstance(args[0], str) and args[0].startswith("torch.cuda."):
            args = (args[0].replace("torch.cuda.", "torch.", 1), *args[1:])
            return Tensor.type(self._cuda(tensor), *args, **kwargs)
        return Tensor.type(tensor, *args, **kwargs)

    def _deepcopy(self, tensor: Tensor, memo: dict[int, Any]) -> Any:
        copied = Tensor.__deepcopy__(tensor, memo)
        if self.books.holds(tensor) and not self.books.holds(copied):
            self.books.allocate(copied)
            self.books.launch("clone", [tensor], [copied])
        return copied

    def _repr(self, tensor: Tensor, **kwargs: Any) -> str:
        if not self.books.holds(tensor):
            return Tensor.__repr__(tensor, **kwargs)
        return f"{Tensor.__repr__(self._cpu(tensor.detach()), **kwargs)} on {self.books.device}"

    def _record_stream(self, tensor: Tensor, stream: Any) -> None:
        self.books.record_stream(tensor, stream.number)

    def _get_device(self, tensor: Tensor) -> int:
        return self.books.index if self.books.holds(tensor) else -1


class _Move(torch.autograd.Function):
    """A copy to the other side; the gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, books: VirtualDevice, non_blocking: bool) -> Tensor:
        ctx.books, ctx.non_blocking = books, non_blocking
        return _copy_across(tensor, books, non_blocking)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _copy_across(gradients[0], ctx.books, ctx.non_blocking), None, None


def _copy_across(tensor: Tensor, books: VirtualDevice, non_blocking: bool) -> Tensor:
    moved = plain_copy(tensor)
    if not books.holds(tensor):
        books.allocate(moved)
    elif non_blocking:
        books.allocate(moved, is_pinned=True)  # Torch puts the result of such a copy into page-locked memory.
    copied_between(books, tensor, moved, non_blocking=non_blocking)
    return moved
