"""The context manager that makes CPU tensors pose as CUDA tensors."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from triton.runtime.interpreter import InterpretedFunction

from devtools.virtual_cuda.books.virtual_device import VirtualDevice
from devtools.virtual_cuda.nccl.groups import NcclGroups
from devtools.virtual_cuda.posing.cuda_functions import (
    storage_members,
    tensor_members,
    torch_accelerator_members,
    torch_cuda_members,
)
from devtools.virtual_cuda.posing.device_mode import DeviceMode
from devtools.virtual_cuda.posing.operator_mode import OperatorMode
from devtools.virtual_cuda.posing.patches import Patches
from devtools.virtual_cuda.posing.triton_kernels import kernel_members

_GIB = 1 << 30


@contextmanager
def virtual_cuda(
    *,
    capability: tuple[int, int] = (9, 0),
    num_devices: int | None = None,
    total_memory: int = 80 * _GIB,
) -> Iterator[VirtualDevice]:
    """Give this process a virtual CUDA device.

    Tensors on ``cuda`` are CPU tensors that pose as CUDA tensors. Every operator is executed at once, with
    real numbers. Streams, events and process groups only note the order of the work, and process groups
    report themselves as NCCL while gloo moves the data. The process group may exist before.

    The device reports this compute capability, as (major, minor), as many devices as the node has ranks
    (``LOCAL_WORLD_SIZE``, or 1) by default, and this number of bytes of memory. Its findings, host
    synchronizations and log stay readable after the end.
    """
    if num_devices is None:
        num_devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    books = VirtualDevice(capability, num_devices, total_memory)
    mode = DeviceMode(books)
    with books, Patches() as patches:
        patches.put(torch.cuda, torch_cuda_members(books))
        patches.put(torch.accelerator, torch_accelerator_members(books))
        patches.put(torch.Tensor, tensor_members(books))
        patches.put(torch.UntypedStorage, storage_members(books))
        patches.put(InterpretedFunction, kernel_members(books))
        NcclGroups(books).install(patches)
        run_backward = _inside(mode, torch.autograd._engine_run_backward)
        patches.put(torch.autograd, {"_engine_run_backward": run_backward})
        patches.put(torch.autograd.graph, {"_engine_run_backward": run_backward})
        with mode, OperatorMode(books):
            yield books
            books.finish_all()
        books.notice_freed_memory()


def _inside(mode: DeviceMode, engine: Callable[..., Any]) -> Callable[..., Any]:
    """The autograd engine, with the device mode active: torch removes the mode inside its own functions."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before, mode.books.host_factory = mode.books.host_factory, False
        try:
            if mode in _get_current_function_mode_stack():
                return engine(*args, **kwargs)
            with mode:
                return engine(*args, **kwargs)
        finally:
            mode.books.host_factory = before

    return run
