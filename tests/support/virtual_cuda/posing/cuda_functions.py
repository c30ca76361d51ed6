"""The table of what replaces the members of ``torch.cuda`` and of ``torch.Tensor``."""

import contextlib
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.virtual_cuda.books.code_place import code_place
from tests.support.virtual_cuda.books.virtual_device import VirtualDevice
from tests.support.virtual_cuda.posing.streams import VirtualEvent, VirtualStream, stream_context

_LEGACY_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


def torch_cuda_members(books: VirtualDevice) -> dict[str, Any]:
    """Replacements of members of ``torch.cuda``, by name."""
    return {
        **_device_members(books),
        **_memory_members(books),
        **_random_members(),
        **{name: _legacy_type(name, dtype) for name, dtype in _LEGACY_TYPES.items()},
        "Stream": VirtualStream,
        "Event": VirtualEvent,
        "ExternalStream": _absent("ExternalStream"),
        "CUDAGraph": _absent("CUDAGraph"),
        "current_stream": lambda device=None: VirtualStream.numbered(books.current_stream),
        "default_stream": lambda device=None: VirtualStream.numbered(0),
        "stream": stream_context,
        "StreamContext": stream_context,
        "set_stream": lambda stream: _set_stream(books, stream),
        "synchronize": lambda device=None: books.synchronize(),
        "is_current_stream_capturing": lambda: False,
        "nvtx": types.SimpleNamespace(
            range_push=lambda message: 0,
            range_pop=lambda: 0,
            range_start=lambda message: 0,
            range_end=lambda range_id: None,
            mark=lambda message: None,
            range=lambda message, *args, **kwargs: contextlib.nullcontext(),
        ),
        "profiler": types.SimpleNamespace(start=lambda: None, stop=lambda: None),
        "cudart": lambda: types.SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0),
    }


def torch_accelerator_members(books: VirtualDevice) -> dict[str, Any]:
    """Replacements of members of ``torch.accelerator``, by name."""
    cuda = torch_cuda_members(books)
    same = ("is_available", "device_count", "current_stream", "set_stream", "synchronize", "empty_cache")
    return {
        **{name: cuda[name] for name in same},
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": cuda["current_device"],
        "set_device_index": cuda["set_device"],
    }


def _device_members(books: VirtualDevice) -> dict[str, Any]:
    def properties(device: Any = None) -> Any:
        major, minor = books.capability
        return types.SimpleNamespace(
            name="virtual CUDA device",
            major=major,
            minor=minor,
            total_memory=books.total_memory,
            multi_processor_count=132,
            warp_size=32,
            is_integrated=False,
        )

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:
            books.index = index

    @contextlib.contextmanager
    def device_context(device: Any) -> Any:
        before = books.index
        set_device(device)
        try:
            yield
        finally:
            books.index = before

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **kwargs: call(),
        "is_bf16_supported": lambda including_emulation=True: books.capability >= (8, 0),
        "device_count": lambda: books.num_devices,
        "current_device": lambda: books.index,
        "set_device": set_device,
        "device": device_context,
        "get_device_name": lambda device=None: "virtual CUDA device",
        "get_device_capability": lambda device=None: books.capability,
        "get_device_properties": properties,
        "can_device_access_peer": lambda device, peer_device: True,
        "utilization": lambda device=None: 0,
        "ipc_collect": lambda: None,
        "empty_cache": lambda: None,
    }


def _memory_members(books: VirtualDevice) -> dict[str, Any]:
    def allocated(device: Any = None) -> int:
        books.notice_freed_memory()
        return books.memory.allocated_bytes

    def peak(device: Any = None) -> int:
        return books.memory.peak_bytes

    def reset(device: Any = None) -> None:
        books.notice_freed_memory()
        books.memory.reset_peak()

    def statistics(device: Any = None) -> dict[str, int]:
        current = {"current": allocated(), "peak": peak()}
        return defaultdict(
            int,
            {
                f"{kind}_bytes.all.{when}": number
                for kind in ("allocated", "reserved", "active")
                for when, number in current.items()
            },
        )

    return {
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "device_memory_used": allocated,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "memory_stats": statistics,
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "mem_get_info": lambda device=None: (books.total_memory - allocated(), books.total_memory),
        "memory_snapshot": lambda *args, **kwargs: [],
        "memory_summary": lambda *args, **kwargs: "",
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
    }


def _random_members() -> dict[str, Any]:
    """The device draws random numbers from the generator of the CPU, as the operators do."""

    def seed_all(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    return {
        "manual_seed": seed_all,
        "manual_seed_all": seed_all,
        "initial_seed": lambda: torch.default_generator.initial_seed(),
        "get_rng_state": lambda device="cuda": torch.default_generator.get_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.default_generator.set_state(new_state),
        "get_rng_state_all": lambda: [torch.default_generator.get_state()],
        "set_rng_state_all": lambda states: torch.default_generator.set_state(states[0]),
        "default_generators": (torch.default_generator,) * 64,
    }


def tensor_members(books: VirtualDevice) -> dict[str, Any]:
    """Replacements of attributes of ``torch.Tensor``, by name."""
    device = torch._C.TensorBase.device.__get__
    usual = getattr(Tensor.__torch_function__, "__func__", None)

    def device_of(tensor: Tensor) -> Any:
        if books.holds(tensor):
            return books.device
        kind = type(tensor)
        special = getattr(kind.__torch_function__, "__func__", None)
        if special not in (None, usual):
            # For example a sharded tensor of a checkpoint, whose class knows this function as Tensor.device.
            return kind.__torch_function__(device, (kind,), (tensor,), {})
        with torch._C.DisableTorchFunction():
            return device(tensor)

    return {
        "device": property(device_of),
        "is_cuda": property(books.holds),
        "is_cpu": property(lambda tensor: device_of(tensor).type == "cpu"),
        "record_stream": lambda tensor, stream: books.record_stream(tensor, stream.number),
    }


def storage_members(books: VirtualDevice) -> dict[str, Any]:
    """Replacements of attributes of ``torch.UntypedStorage``, by name."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        books.notice_freed_memory()
        block = books.memory.of_storage(storage)
        if block is not None and not block.is_pinned:
            books.give_back(block)
        result = resize(storage, size)
        if block is not None and size and not block.is_pinned:
            books.memory.replace(storage, books.current_stream, code_place())
        return result

    return {"resize_": resize_}


def _set_stream(books: VirtualDevice, stream: VirtualStream | None) -> None:
    if stream is not None:
        books.current_stack[-1] = stream.number


def _absent(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"torch.cuda.{name}: virtual_cuda does not model it; use streams and events"
        )

    return refuse


def _legacy_type(name: str, dtype: torch.dtype) -> Any:
    """Stands for a class such as ``torch.cuda.FloatTensor``: makes tensors and recognizes them."""

    class Recognizing(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, Tensor) and value.is_cuda and value.dtype == dtype

        def __call__(cls, *args: Any) -> Tensor:
            if args and all(isinstance(size, int) for size in args):
                return torch.empty(*args, dtype=dtype, device="cuda")
            return torch.tensor(args[0] if args else [], dtype=dtype, device="cuda")

    return Recognizing(name, (), {})
