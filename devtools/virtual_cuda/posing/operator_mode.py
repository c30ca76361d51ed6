"""Sees every operator that reaches the dispatcher, and notes what it does on the virtual device."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from devtools.virtual_cuda.books.findings import FindingKind
from devtools.virtual_cuda.books.stream_order import HOST
from devtools.virtual_cuda.books.virtual_device import VirtualDevice

# The host waits in these operators, because it needs their values or the size of their results.
_HOST_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "is_nonzero"}
_HOST_WAITS |= {"_unique", "_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive"}
# These operators only reserve memory.
_RESERVES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
# CUDA accepts CPU tensors here and copies them.
_COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_ONLY_WRITES = {"copy_", "zero_", "fill_", "uniform_", "normal_", "random_", "exponential_"}
_GROUPED_MM_CAPABILITIES = (9, 10)  # On others, torch loops over the groups and reads their sizes.


class OperatorMode(TorchDispatchMode):
    """Executes operators on the CPU, and tells the virtual device about those that touch its tensors."""

    def __init__(self, books: VirtualDevice) -> None:
        super().__init__()
        self._books = books

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        books = self._books
        namespace, name, arguments = _signature(func)
        values = [(*argument, value) for argument, value in zip(arguments, args, strict=False)]
        values += [(*argument, kwargs[argument[0]]) for argument in arguments if argument[0] in kwargs]
        named = [(of, writes, tensor) for of, writes, value in values for tensor in _tensors(value)]
        on_device = [tensor for *_, tensor in named if books.holds(tensor)]
        if not on_device:
            return self._on_host(func, named, args, kwargs)
        if namespace in ("c10d", "_c10d_functional"):
            raise NotImplementedError(
                f"virtual_cuda: {func} is not in the table of collectives in nccl_groups.py; add it there"
            )
        if name in _COPIES and any(not books.holds(tensor) and tensor.numel() for *_, tensor in named):
            return self._copy(func, name, args, kwargs)
        if name not in _RESERVES and not _is_view(func):
            for tensor in on_device:
                books.refuse_freed(name, tensor)
        num_synced = self._check_devices(name, named)
        outputs = func(*args, **kwargs)
        leaves = _tensors(outputs)
        made = [tensor for tensor in leaves if books.memory.of(tensor) is None]
        for tensor in made:
            books.allocate(tensor)
        written = [tensor for _, writes, tensor in named if writes] + made
        reads = [tensor for _, writes, tensor in named if not writes or name not in _ONLY_WRITES]
        waits = _waits(books, name, args, kwargs)
        if name in _RESERVES or not (waits or written):
            return outputs
        if not waits and not any(tensor.numel() for tensor in written):
            return outputs  # CUDA launches nothing for empty results.
        if name.endswith("_like") or name.startswith("new_"):
            reads = []
        books.launch(name, reads, written)
        for _ in range(waits + num_synced):
            books.host_sync(name)
        return outputs

    def _on_host(
        self, func: Any, named: list[tuple[str, bool, Tensor]], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """An operator on CPU tensors; page-locked ones may be in use by a stream.

        Where Python did not ask for a new tensor, torch's own code did, for example autograd's formulas,
        which make zeros on the device of the gradients. The operator does not show that device.
        """
        outputs = func(*args, **kwargs)
        if not named and not self._books.host_factory:
            for tensor in _tensors(outputs):
                self._books.memory.leave_undecided(tensor)
        pinned = [(writes, tensor) for _, writes, tensor in named if self._books.holds_pinned(tensor)]
        if pinned and not _is_view(func):
            reads = [tensor for writes, tensor in pinned if not writes]
            writes = [tensor for writes, tensor in pinned if writes]
            self._books.launch(func._schema.name, reads, writes, actor=HOST, kind=None)
        return outputs

    def _copy(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A copy between the device and the host by ``copy_``."""
        books = self._books
        target, source = args[0], args[1]
        if isinstance(target, (list, tuple)):
            for written, read in zip(target, source, strict=True):
                written.copy_(read, **kwargs)
            return None
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        outputs = func(*args, **kwargs)
        copied_between(books, source, target, non_blocking=non_blocking)
        return outputs

    def _check_devices(self, name: str, named: list[tuple[str, bool, Tensor]]) -> int:
        """Report CPU tensors; return how many CPU indices have to be copied while the host waits."""
        num_copied = 0
        for argument, _, tensor in named:
            if self._books.holds(tensor):
                continue
            if self._books.memory.is_undecided(tensor):
                self._books.allocate(tensor)
                continue
            if name in _INDEXES and argument == "indices" and self._books.holds(named[0][2]):
                num_copied += 1
            elif tensor.dim():
                self._books.found.wrong_tensor(FindingKind.DEVICE_MIX, f"argument {argument!r} of {name}")
        return num_copied


def copied_between(books: VirtualDevice, source: Tensor, target: Tensor, *, non_blocking: bool) -> None:
    """Note a copy of which one side is on the device and the other side is on the host.

    The host waits for a copy unless it is asked not to; and even then if it copies to memory that is not
    page-locked.
    """
    to_host = books.holds(source)
    books.launch("copy to the host" if to_host else "copy to the device", [source], [target])
    if not non_blocking or (to_host and not books.holds_pinned(target)):
        books.host_sync("copy to the host" if to_host else "copy to the device")


@cache
def _signature(func: Any) -> tuple[str, str, list[tuple[str, bool]]]:
    """Namespace and name of an operator, and of each argument the name and whether it is written."""
    namespace, _, name = func._schema.name.partition("::")
    infos = [(argument.name, argument.alias_info) for argument in func._schema.arguments]
    return namespace, name, [(name, info is not None and info.is_write) for name, info in infos]


@cache
def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (int, float, str, bool, type(None), torch.dtype, torch.device)):
        return []
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _waits(books: VirtualDevice, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How often the host waits inside an operator."""
    if name == "repeat_interleave":  # Without the size of its output, the operator has to compute it.
        return int(kwargs.get("output_size") is None)
    if name == "_grouped_mm":
        return int(books.capability[0] not in _GROUPED_MM_CAPABILITIES)
    if name in _INDEXES:
        # An index by a mask needs the number of the mask's true elements. The exception is a number that is
        # assigned to the elements of a mask, because CUDA only fills them.
        if len(args) > 2 and not args[2].dim() and not books.holds(args[2]):
            return 0
        return sum(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return int(name in _HOST_WAITS)
