"""Gathers the counts of all ranks, and brings them to the host while the device continues.

On CUDA, the gather runs on the current stream. A second stream copies its result to pinned memory, and an
event marks the end of the copy. The host queues other work in the meantime and then waits for the event
only::

    host            start ── queue the permutation ── wait ▒▒▒▒ plan the dispatch, queue it
    main stream     ... gate ── counts, all-gather ─┬─ permutation ──────── (stays busy) ────
    copy stream                                     └─ copy ── event

On the CPU, the messages of the gather travel while the caller does other work, and ``wait`` waits for them.

Shape letters: E experts, D devices, X expert-tensor-parallel peers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.lane_streams import lane_stream
from megatron_fssdp.collectives.messages import exchange, wait_for

_COUNTS_TAG = 1 << 16  # Exchanges of rows use small numbers as tags: 0, 1, ... for each tensor.


@dataclass(frozen=True, eq=False)
class CountsOnTheWay:
    """Counts that travel to this rank's host.

    Attributes:
        tensors: Gathered counts and the tensors that travel with them. On CUDA they are kept until the copies
            are complete.
        works: Messages that are under way, on the CPU only.
        copies: Copies of ``tensors`` in the host's memory; the tensors themselves on the CPU.
        copied: Event after the copies; ``None`` on the CPU.
    """

    tensors: Sequence[Tensor]
    works: Sequence[dist.Work]
    copies: Sequence[Tensor]
    copied: torch.cuda.Event | None

    def wait(self) -> Sequence[Tensor]:
        """Make the host wait, and return the gathered counts and what travelled with them, on the host."""
        wait_for(self.works)
        if self.copied is not None:
            self.copied.synchronize()
        return self.copies


def start_counts(
    counts_E: Tensor,
    group: dist.ProcessGroup,
    peers: dist.ProcessGroup | None = None,
    also: Sequence[Tensor] = (),
) -> CountsOnTheWay:
    """Start to gather the counts of all ranks on this rank's host.

    Every rank of both groups must call it.

    Args:
        counts_E: Counts of this rank, ``[E]``; E and the dtype are equal on all ranks.
        group: Process group of the expert-parallel ranks.
        peers: Process group of the expert-tensor-parallel peers; ``None`` if there are none.
        also: Tensors of this rank that the host needs at the same time. They are not gathered.

    Returns:
        A handle. The first result of its ``wait`` has the counts of all peers and devices, ``[X, D, E]``. The
        other results are ``also``.
    """
    counts, works = _start_gather(counts_E, group)
    counts = counts.unsqueeze(0)
    if peers is not None:
        wait_for(works)
        shape = counts.shape[1:]
        counts, works = _start_gather(counts.view(-1), peers)
        counts = counts.view(-1, *shape)
    tensors = [counts, *also]
    if counts.device.type == "cpu":
        return CountsOnTheWay(tensors, works, tensors, None)
    copier = lane_stream("counts", group, counts.device)
    copier.wait_stream(torch.cuda.current_stream(counts.device))
    with torch.cuda.stream(copier):
        # A copy that does not block goes to pinned memory, which the allocator of the host keeps for reuse.
        copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        copied = torch.cuda.Event()
        copied.record(copier)
    return CountsOnTheWay(tensors, works, copies, copied)


def gather_counts(counts_E: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the counts of all ranks on every rank's device.

    Args:
        counts_E: Counts of this rank, ``[E]``; E and the dtype are equal on all ranks.
        group: Process group of the ranks.

    Returns:
        Counts of all ranks, ``[D, E]``; row ``d`` comes from rank ``d``.
    """
    counts_DE, works = _start_gather(counts_E, group)
    wait_for(works)
    return counts_DE


def _start_gather(counts_E: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """Start to gather; on CUDA, work that is queued later on the current stream runs after the gather."""
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return counts_E.unsqueeze(0), []
    counts_E = counts_E.contiguous()
    counts_DE = counts_E.new_empty(world_size, counts_E.numel())
    if counts_E.device.type != "cpu":
        dist.all_gather_into_tensor(counts_DE, counts_E, group=group)
        return counts_DE, []
    everyone = range(world_size)
    works = exchange(dict.fromkeys(everyone, counts_E), dict(enumerate(counts_DE)), group, _COUNTS_TAG)
    return counts_DE, works
