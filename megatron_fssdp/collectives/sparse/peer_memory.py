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
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_ALLOWED, _ARRIVED = 0, 1  # Channels of flags: from the receiver of a put, and to it.


class PeerMemory(Protocol):
    """Memory of equal shapes on all ranks of a group, whose constructor is collective over them.

    ``of_rank`` has that of each rank. Between two ranks, each channel has one flag in each direction.
    """

    of_rank: Sequence[Tensor]

    def signal(self, peer: int, channel: int) -> None:
        """Set the flag to a peer, once it has taken the last one."""

    def await_signal(self, peer: int, channel: int) -> None:
        """Wait for the flag from a peer, and clear it."""


class SymmetricMemory:
    """Memory of CUDA devices that reach each other. What it does is in the order of the current stream."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        shape: Sequence[int],
        dtype: torch.dtype,
        timeout: timedelta,
        device: torch.device,
    ) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory  # It takes a moment.

        try:
            self._own = symmetric_memory.empty(*shape, dtype=dtype, device=device)
            self._handle = symmetric_memory.rendezvous(self._own, group)
        except RuntimeError as error:
            raise RuntimeError(
                f"symmetric memory: got '{str(error).splitlines()[0]}', wanted GPUs of one node that can "
                "access each other; unset FSSDP_PEER_PUTS"
            ) from error
        offset = getattr(self._handle, "offset", 0) // dtype.itemsize  # Torch 2.6 has no offsets.
        ranks = range(group.size())
        self.of_rank: Sequence[Tensor] = [
            self._handle.get_buffer(rank, tuple(shape), dtype, offset) for rank in ranks
        ]
        self._timeout_ms = int(timeout.total_seconds() * 1e3)

    def signal(self, peer: int, channel: int) -> None:
        """Set the flag to a peer, once it has taken the last one."""
        self._handle.put_signal(peer, channel, self._timeout_ms)

    def await_signal(self, peer: int, channel: int) -> None:
        """Wait for the flag from a peer, and clear it."""
        self._handle.wait_signal(peer, channel, self._timeout_ms)


class SharedMemory:
    """The same between CPU processes of one machine, by a file that all of them map. The thread waits."""

    def __init__(
        self, group: dist.ProcessGroup, shape: Sequence[int], dtype: torch.dtype, timeout: timedelta
    ) -> None:
        self._rank, size = group.rank(), group.size()
        self._timeout_s = timeout.total_seconds()
        flags, memory = (size, 2, size), (size, *shape)
        border = 8 * 2 * size * size  # bytes of the flags
        num_bytes = border + torch.Size(memory).numel() * dtype.itemsize
        with tempfile.NamedTemporaryFile() as file:
            names = [file.name]  # All take the file of the first rank, which is full of zeros.
            dist.broadcast_object_list(names, group=group, group_src=0)
            mapped = torch.from_file(names[0], shared=True, size=num_bytes, dtype=torch.uint8)
            dist.barrier(group)
        self._flags = mapped[:border].view(torch.int64).view(flags).numpy()
        # A put into a peer's part is no change of this rank's part, as autograd would see it without .data.
        self.of_rank: Sequence[Tensor] = [one.data for one in mapped[border:].view(dtype).view(memory)]

    def signal(self, peer: int, channel: int) -> None:
        """Set the flag to a peer, once it has taken the last one."""
        self._turn((peer, channel, self._rank), 0)

    def await_signal(self, peer: int, channel: int) -> None:
        """Wait for the flag from a peer, and clear it."""
        self._turn((self._rank, channel, peer), 1)

    def _turn(self, place: tuple[int, int, int], before: int) -> None:
        end_s = time.monotonic() + self._timeout_s
        while self._flags[place] != before:
            if time.monotonic() > end_s:
                raise RuntimeError(f"rank {self._rank}: got no flag {place} in {self._timeout_s:g} s")
            time.sleep(5e-5)
        self._flags[place] = 1 - before


class _PutEnd(dist.Work):
    """The end of a peer's put, which may bring several messages of a step."""

    def __init__(self, memory: PeerMemory, peer: int) -> None:
        super().__init__()
        self._memory, self._peer, self._is_noted = memory, peer, False

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait, as other works do."""
        if not self._is_noted:
            self._is_noted = True
            self._memory.await_signal(self._peer, _ARRIVED)
        return True


class WeightPuts:
    """Puts of experts into the slots of peers, for the steps of a transfer.

    ``peers`` are the other devices that share the memory ``[W, Q]`` with this one, each with its rank there,
    and ``slot_of`` has the slot, 0 to W - 1, of each expert that a device receives.
    """

    def __init__(
        self, memory: PeerMemory, peers: Mapping[int, int], slot_of: Mapping[tuple[int, int], int]
    ) -> None:
        self._memory, self.peers, self._slot_of = memory, peers, slot_of

    def slot(self, device: int, expert: int) -> Tensor:
        """The memory ``[Q]`` of an expert on a peer."""
        return self._memory.of_rank[self.peers[device]][self._slot_of[device, expert]]

    def open(self, sources: Container[int], destinations: Container[int]) -> None:
        """Begin a transfer: sources may write from now on, and destinations have to allow it as well."""
        for device, rank in self.peers.items():
            if device in sources:
                self._memory.signal(rank, _ALLOWED)
        for device, rank in self.peers.items():
            if device in destinations:
                self._memory.await_signal(rank, _ALLOWED)

    def end_of(self, device: int) -> dist.Work:
        """What a peer puts in one step; it has to be awaited before the next step."""
        return _PutEnd(self._memory, self.peers[device])

    def put(self, copied: Mapping[int, Iterable[tuple[Tensor, Tensor]]]) -> None:
        """Copy into slots of each of these peers: pairs of a part of a slot and what belongs there."""
        for device, pairs in copied.items():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)  # Several at once would be a kernel.
            self._memory.signal(self.peers[device], _ARRIVED)
