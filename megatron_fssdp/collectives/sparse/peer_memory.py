"""Memory of the ranks of one node that each of them writes to, and flags between every two of them.

A rank puts weights straight into the memory of a peer. Between GPUs, copy engines do this, and one warp turns
each flag; messages take multiprocessors. Both sides go on in the order of their stream, or thread::

    receiver    last readers ── flag: slots are free ───────────────────── await ── first readers
                                              └──────┐                       ▲
    sender      ──────────────────────────────────── await ── copies ── flag: a step has arrived

Shape letters: W slots, Q elements of an expert.
"""

import tempfile
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast, override

import torch
import torch.distributed as dist
from torch import Tensor

_FREE, _ARRIVED = 0, 1  # Channels of flags: from the receiver of a put, and to it.


class SymmetricMemory:
    """Memory of equal shapes, ``of_rank``, on all ranks of a group: CUDA devices that access each other.

    The constructor is collective. What the memory does is in the order of the current stream.
    """

    def __init__(
        self, group: dist.ProcessGroup, shape: Sequence[int], timeout: timedelta, **kind: Any
    ) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory  # The import takes a moment.

        try:
            self._own = symmetric_memory.empty(*shape, **kind)
            self._handle = symmetric_memory.rendezvous(self._own, group)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise RuntimeError(
                f"FSSDP_PEER_PUTS: got '{why}', wanted GPUs that access each other; unset it"
            ) from error
        begin = getattr(self._handle, "offset", 0) // self._own.itemsize  # Torch 2.6 has no offsets.
        of = self._own.shape, self._own.dtype, begin
        self.of_rank = [self._handle.get_buffer(rank, *of) for rank in range(group.size())]
        self._timeout_ms = int(timeout.total_seconds() * 1e3)

    def signal(self, peer: int, channel: int) -> None:
        """Set the flag of a channel to a peer, once the peer has cleared it."""
        self._handle.put_signal(peer, channel, self._timeout_ms)

    def await_signal(self, peer: int, channel: int) -> None:
        """Wait for the flag from a peer, and clear it."""
        self._handle.wait_signal(peer, channel, self._timeout_ms)


class SharedMemory(SymmetricMemory):
    """The same between CPU processes of one machine, by a file that all of them map. The thread waits."""

    def __init__(
        self, group: dist.ProcessGroup, shape: Sequence[int], timeout: timedelta, dtype: torch.dtype, **_: Any
    ) -> None:
        self._rank, size, self._timeout_s = group.rank(), group.size(), timeout.total_seconds()
        flags, memory = torch.Size((size, 2, size)), torch.Size((size, *shape))
        border = 8 * flags.numel()
        num_bytes = border + memory.numel() * dtype.itemsize
        with tempfile.NamedTemporaryFile() as file:
            names = [file.name]  # All map the first rank's, which is full of zeros.
            dist.broadcast_object_list(names, group=group, group_src=0)
            mapped = torch.from_file(names[0], shared=True, size=num_bytes, dtype=torch.uint8)
            dist.barrier(group)
        self._flags = mapped[:border].view(torch.int64).view(flags).numpy()
        # Without .data, autograd would take a put into a peer's part for a change of this rank's.
        self.of_rank = [memory_of_rank.data for memory_of_rank in mapped[border:].view(dtype).view(memory)]

    @override
    def signal(self, peer: int, channel: int) -> None:
        self._turn((peer, channel, self._rank), 0)

    @override
    def await_signal(self, peer: int, channel: int) -> None:
        self._turn((self._rank, channel, peer), 1)

    def _turn(self, place: tuple[int, int, int], before: int) -> None:
        end_s = time.monotonic() + self._timeout_s
        while self._flags[place] != before:
            if time.monotonic() > end_s:
                raise RuntimeError(f"rank {self._rank}: got no flag {place} in {self._timeout_s:g} s")
            time.sleep(5e-5)
        self._flags[place] = 1 - before


class WeightPuts:
    """Puts of experts into the slots of peers, for the steps of a transfer.

    ``peers`` are the other devices that share the memory ``[W, Q]`` with this one, each with its rank there,
    and ``slot_of`` has the slot, 0 to W - 1, of each expert that a device receives.
    """

    def __init__(
        self, memory: SymmetricMemory, peers: Mapping[int, int], slot_of: Mapping[tuple[int, int], int]
    ) -> None:
        self._memory, self.peers, self._slot_of = memory, peers, slot_of

    def slot(self, device: int, expert: int) -> Tensor:
        """The memory ``[Q]`` of an expert on a peer."""
        return self._memory.of_rank[self.peers[device]][self._slot_of[device, expert]]

    def open(self, sources: Container[int], destinations: Container[int]) -> None:
        """Begin a transfer: sources may write from now on, and destinations have to allow it as well."""
        for rank in [rank for device, rank in self.peers.items() if device in sources]:
            self._memory.signal(rank, _FREE)
        for rank in [rank for device, rank in self.peers.items() if device in destinations]:
            self._memory.await_signal(rank, _FREE)

    def put(self, copied: Mapping[int, Iterable[tuple[Tensor, Tensor]]]) -> None:
        """Copy into slots of each of these peers in one step: parts of slots, with what belongs there."""
        for device, pairs in copied.items():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)  # Several at once would be a kernel.
            self._memory.signal(self.peers[device], _ARRIVED)

    def await_step(self, devices: Iterable[int]) -> None:
        """Wait for what these peers put in one step, before the next step."""
        for device in devices:
            self._memory.await_signal(self.peers[device], _ARRIVED)


NO_PUTS = WeightPuts(cast(SymmetricMemory, None), {}, {})
"""For transfers by messages alone."""
