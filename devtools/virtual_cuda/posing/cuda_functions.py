"""The table of what replaces the members of ``torch.cuda``, ``torch.Tensor`` and ``torch.UntypedStorage``."""

import contextlib
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from devtools.virtual_cuda.books.code_place import code_place
from devtools.virtual_cuda.books.virtual_device import VirtualDevice
from devtools.virtual_cuda.posing.streams import VirtualEvent, VirtualStream, stream_context

_LEGACY_TYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
_LEGACY_TYPES |= {"Int": "int32", "Long": "int64", "Short": "int16", "Byte": "uint8", "Bool": "bool"}


def torch_cuda_members(books: VirtualDevice) -> dict[str, Any]:
    def set_stream(stream: VirtualStream | None) -> None:
        if stream is not None:
            books.current_stack[-1] = stream.number

    nvtx = dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark"), _nothing)
    return {
        **_device_members(books),
        **_memory_members(books),
        **_random_members(),
        **{f"{name}Tensor": _legacy_type(getattr(torch, of)) for name, of in _LEGACY_TYPES.items()},
        "Stream": VirtualStream,
        "Event": VirtualEvent,
        "ExternalStream": _absent("ExternalStream"),
        "CUDAGraph": _absent("CUDAGraph"),
        "current_stream": lambda device=None: VirtualStream.numbered(books.current_stream),
        "default_stream": lambda device=None: VirtualStream.numbered(0),
        "stream": stream_context,
        "StreamContext": stream_context,
        "set_stream": set_stream,
        "synchronize": lambda device=None: books.synchronize(),
        "is_current_stream_capturing": lambda: False,
        "nvtx": types.SimpleNamespace(**nvtx, range=lambda *_, **__: contextlib.nullcontext()),
        "profiler": types.SimpleNamespace(start=_nothing, stop=_nothing),
        "cudart": lambda: types.SimpleNamespace(cudaProfilerStart=_nothing, cudaProfilerStop=_nothing),
    }


def torch_accelerator_members(books: VirtualDevice) -> dict[str, Any]:
    cuda = torch_cuda_members(books)
    same = ("is_available", "device_count", "current_stream", "set_stream", "synchronize", "empty_cache")
    return {
        **{name: cuda[name] for name in same},
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": cuda["current_device"],
        "set_device_index": cuda["set_device"],
    }


def _nothing(*_: Any, **__: Any) -> int:
    return 0


def _device_members(books: VirtualDevice) -> dict[str, Any]:
    name = "virtual CUDA device"

    def properties(device: Any = None) -> Any:
        major, minor = books.capability
        numbers = {"major": major, "minor": minor, "multi_processor_count": 132, "warp_size": 32}
        total = books.total_memory
        return types.SimpleNamespace(name=name, total_memory=total, is_integrated=False, **numbers)

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:
            books.index = index

    @contextlib.contextmanager
    def device_context(device: Any) -> Iterator[None]:
        before = books.index
        set_device(device)
        try:
            yield
        finally:
            books.index = before

    return {
        **dict.fromkeys(("init", "_lazy_init", "utilization", "ipc_collect", "empty_cache"), _nothing),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_call": lambda call, **kwargs: call(),
        "is_bf16_supported": lambda including_emulation=True: books.capability >= (8, 0),
        "device_count": lambda: books.num_devices,
        "current_device": lambda: books.index,
        "set_device": set_device,
        "device": device_context,
        "device_of": lambda tensor: device_context(tensor.device),
        "get_device_name": lambda device=None: name,
        "get_device_capability": lambda device=None: books.capability,
        "get_device_properties": properties,
        "can_device_access_peer": lambda device, peer_device: True,
    }


def _memory_members(books: VirtualDevice) -> dict[str, Any]:
    def allocated(device: Any = None) -> int:
        books.notice_freed_memory()
        return books.memory.allocated_bytes

    def peak(device: Any = None) -> int:
        return books.memory.peak_bytes

    def reset(device: Any = None) -> None:
        books.memory.peak_bytes = allocated()

    def statistics(device: Any = None) -> dict[str, int]:
        current = {"current": allocated(), "peak": peak()}
        kinds = ("allocated", "reserved", "active")
        return defaultdict(
            int, {f"{kind}_bytes.all.{when}": current[when] for kind in kinds for when in current}
        )

    return {
        **dict.fromkeys(("memory_allocated", "memory_reserved", "device_memory_used"), allocated),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), peak),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), reset),
        "memory_stats": statistics,
        "mem_get_info": lambda device=None: (books.total_memory - allocated(), books.total_memory),
        "memory_snapshot": lambda *_, **__: [],
        "memory_summary": lambda *_, **__: "",
        "set_per_process_memory_fraction": _nothing,
    }


def _random_members() -> dict[str, Any]:
    """The device draws random numbers from the generator of the CPU, as the operators do."""
    generator = torch.default_generator
    return {
        **dict.fromkeys(("manual_seed", "manual_seed_all"), lambda seed: generator.manual_seed(int(seed))),
        "initial_seed": generator.initial_seed,
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda new_state, device="cuda": generator.set_state(new_state),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "default_generators": (generator,) * 64,
    }


def tensor_members(books: VirtualDevice) -> dict[str, Any]:
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


def _absent(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"torch.cuda.{name}: virtual_cuda does not model it; use streams and events"
        )

    return refuse


def _legacy_type(dtype: torch.dtype) -> Any:
    """Stands for a class such as ``torch.cuda.FloatTensor``: makes tensors and recognizes them."""

    class Recognizing(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, Tensor) and value.is_cuda and value.dtype == dtype

        def __call__(cls, *args: Any) -> Tensor:
            if args and all(isinstance(size, int) for size in args):
                return torch.empty(*args, dtype=dtype, device="cuda")
            return torch.tensor(args[0] if args else [], dtype=dtype, device="cuda")

    return Recognizing("legacy_type", (), {})
