"""Several ranks on one GPU: their process groups pose as NCCL's, and their tensors travel over gloo.

NCCL refuses two ranks on one device. With these groups, one card is enough to run replicas, re-sharding and
every dispatcher. All else is real: kernels, streams, events and the allocator. Speeds mean nothing.

    torchrun --nproc-per-node=4 -m devtools.one_card [-m MODULE | SCRIPT.py] ARGS…

A group does its work in the order of issue, in a thread and on a stream of its own: it waits for what is on
the current stream at the call, copies the tensors into pinned memory, calls gloo and copies the results back.
As with NCCL, a call returns at once, and results are complete only after ``wait()``. Unlike NCCL's, a
``wait()`` stops the host, and tensors may be on the CPU as well, which serves tests without a GPU.
"""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from devtools.virtual_cuda.nccl.backends import Backends
from devtools.virtual_cuda.nccl.collectives import COLLECTIVES, Collective
from devtools.virtual_cuda.posing.patches import Patches

Part = Callable[[], None] | tuple[str, Tensor, int]
"""A collective, or a message: its direction, its tensor and the other rank."""

_BATCHED, _SINGLE = 0, 1  # Tags, so that the threads of both kinds of messages do not mix them up.


class CardWork:
    def __init__(self, done: "Future[None]", around_wait: Callable[[], Any]) -> None:
        self._done, self._around_wait = done, around_wait

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the results are on the device; raise what gloo raised."""
        with self._around_wait():
            self._done.result()
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        return self._done.done()

    is_success = is_completed


class CardGroups:
    """The process groups of a rank that shares its card with others; posing ones report NCCL as backend.

    ``around_waits`` makes a context in which this rank waits for others.
    """

    def __init__(self, *, poses: bool = True, around_waits: Callable[[], Any] = nullcontext) -> None:
        self._poses, self._around_waits = poses, around_waits
        self._backends = Backends()
        self._originals: dict[str, Callable[..., Any]] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._streams: dict[str, Any] = {}
        self._coalesced: dict[str, list[Part]] = {}

    def install(self, patches: Patches) -> None:
        """Replace the methods of process groups, and functions that make groups or ask for their backend."""
        methods: dict[str, Callable[..., Any]] = {
            name: partial(self._collective, name, collective)
            for name, collective in COLLECTIVES.items()
            if hasattr(ProcessGroup, name)
        }
        methods |= {name: partial(self._message, name) for name in ("send", "recv")}
        methods |= {
            "_start_coalescing": self._start_coalescing,
            "_end_coalescing": self._end_coalescing,
            "_get_backend": self._get_backend,
        }
        self._originals = {name: getattr(ProcessGroup, name) for name in methods}
        patches.put(ProcessGroup, {name: self._method(name, method) for name, method in methods.items()})
        if self._poses:
            self._backends.install(patches)

    def _method(self, name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            chosen = replacement if self._backends.is_nccl(group) else self._originals[name]
            return chosen(group, *args, **kwargs)

        return call

    def _get_backend(self, group: ProcessGroup, device: torch.device) -> Any:
        return self._backends.of_nccl(group)

    def _collective(
        self, name: str, collective: Collective, group: ProcessGroup, *args: Any, **kwargs: Any
    ) -> CardWork | None:
        def run(*args: Any, **kwargs: Any) -> None:
            if collective.run is None:
                self._originals[name](group, *args, **kwargs).wait()
            else:
                collective.run(self._originals, group, *args, **kwargs)

        reads, writes = collective.touched(group, *args, **kwargs)
        tensors = {id(tensor): tensor for tensor in (*reads, *writes)}
        return self._add(group, partial(_on_copies, run, tensors, writes, args, kwargs))

    def _message(
        self, direction: str, group: ProcessGroup, tensors: Sequence[Tensor], peer: int, tag: int = 0
    ) -> CardWork | None:
        if group.group_name in self._coalesced:
            return self._add(group, (direction, tensors[0], peer))
        return self._issue(group, [(direction, tensors[0], peer)], f"{direction} {peer}", _SINGLE)

    def _start_coalescing(self, group: ProcessGroup, device: torch.device) -> None:
        self._coalesced[group.group_name] = []

    def _end_coalescing(self, group: ProcessGroup, device: torch.device) -> CardWork:
        return self._issue(group, self._coalesced.pop(group.group_name))

    def _add(self, group: ProcessGroup, part: Part) -> CardWork | None:
        if group.group_name in self._coalesced:
            self._coalesced[group.group_name].append(part)
            return None
        return self._issue(group, [part])

    def _issue(
        self, group: ProcessGroup, parts: Sequence[Part], pair: str = "", tag: int = _BATCHED
    ) -> CardWork:
        """Start parts of one operation in the thread of the group, or of a pair of ranks for one message."""
        key = f"{group.group_name} {pair}"
        if key not in self._threads:
            self._threads[key] = ThreadPoolExecutor(1, thread_name_prefix=key)
            self._streams[key] = torch.cuda.Stream() if torch.cuda.is_available() else None
        begun = torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None
        done = self._threads[key].submit(self._run, group, parts, begun, self._streams[key], tag)
        return CardWork(done, self._around_waits)

    def _run(self, group: ProcessGroup, parts: Sequence[Part], begun: Any, stream: Any, tag: int) -> None:
        with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            if begun is not None:
                begun.synchronize()
            for part in parts:
                if not isinstance(part, tuple):
                    part()
            # Messages to receive go first: their names come first in the alphabet.
            messages = sorted((part for part in parts if isinstance(part, tuple)), key=lambda part: part[0])
            started = []
            for direction, tensor, peer in messages:
                copy = _on_host(tensor)
                started.append((copy, self._originals[direction](group, [copy], peer, tag)))
            for (direction, tensor, _), (copy, work) in zip(messages, started, strict=True):
                work.wait()
                if direction == "recv":
                    tensor.data.copy_(copy)
            if stream is not None:
                stream.synchronize()


def _on_copies(
    run: Callable[..., None],
    tensors: dict[int, Tensor],
    writes: Sequence[Tensor],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:
    """Call a collective on host copies of its tensors, and copy its results back."""
    copies = {key: _on_host(tensor) for key, tensor in tensors.items()}
    copied = pytree.tree_map(lambda value: copies.get(id(value), value), (tuple(args), kwargs))
    run(*copied[0], **copied[1])
    for tensor in writes:
        tensor.data.copy_(copies[id(tensor)])


def _on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor into pinned memory, contiguous."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor.detach())


def main(words: list[str]) -> None:
    """Run a script or a module on the first card, and end this process with its exit code."""
    from devtools.virtual_cuda.programs.launcher import run_program

    # Every rank sees a node of one rank and one card. Give nodes=N, because no variable says more.
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MEGATRON_FSSDP_DEVICE": "cuda"}
    is_module = words[:1] == ["-m"]
    with Patches() as patches:
        CardGroups().install(patches)
        sys.exit(run_program(words[is_module:], is_module))


if __name__ == "__main__":
    main(sys.argv[1:])
