"""Gathers the counts of all ranks, and brings them to the host while the device continues.

On CUDA, the gather runs on the current stream. A second stream copies its result to pinned memory, and an
event marks the end of the copy. The host queues other work in the meantime and then waits for the event
only::

    host            start ── queue the permutation ── wait ▒▒▒▒ plan the dispatch, queue it
    main stream     ... gate ── counts, all-gather ─┬─ permutation ──────── (stays busy) ────
    copy stream                                     └─ copy ── event

On the CPU, the gather runs while the caller does other work, and ``wait`` waits for it.

Shape letters: E experts, D devices, X expert-tensor-parallel peers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.messages import wait_for
from megatron_fssdp.collectives.transfer_lanes import stream_lane


@dataclass(frozen=True, eq=False)
class CountsOnTheWay:
    """Counts that travel to this rank's host."""

    gathered: Tensor  # On CUDA, they are kept until the copy is complete.
    works: Sequence[dist.Work]  # the gather, on the CPU only
    copy: Tensor  # in the host's memory
    copied: torch.cuda.Event | None  # after the copy; None on the CPU

    def wait(self) -> Tensor:
        """Wait on the host for the gathered counts, ``[X, D, E]``."""
        wait_for(self.works)
        if self.copied is not None:
            self.copied.synchronize()
        return self.copy


def start_counts(
    counts_E: Tensor, group: dist.ProcessGroup, peers: dist.ProcessGroup | None = None
) -> CountsOnTheWay:
    """Start to gather the counts ``[E]`` of all expert-parallel ranks, and those of their ``peers`` if any.

    Every rank of both groups must call it, with as many counts of the same dtype.
    """
    num_experts = counts_E.numel()  # len() is slow where functions of torch are replaced.
    if peers is not None:
        counts_E, group = gather_counts(counts_E, group).view(-1), peers
    counts, works = _start_gather(counts_E, group)
    counts = counts.view(1 if peers is None else len(counts), -1, num_experts)
    if counts.device.type == "cpu":
        return CountsOnTheWay(counts, works, counts, None)
    copier = stream_lane(group, counts.device, "counts").stream
    copier.wait_stream(torch.cuda.current_stream(counts.device))
    with torch.cuda.stream(copier):
        # A copy that does not block goes to pinned memory, which the allocator of the host keeps for reuse.
        copy = counts.to("cpu", non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(copier)
    return CountsOnTheWay(counts, works, copy, copied)


def gather_counts(counts_E: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the counts ``[E]`` of all ranks on every rank's device: ``[D, E]``, by rank."""
    counts_DE, works = _start_gather(counts_E, group)
    wait_for(works)
    return counts_DE


def _start_gather(counts_E: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """Start to gather; on CUDA, work that is queued later on the current stream runs after the gather."""
    num_experts = counts_E.numel()
    counts = counts_E.new_empty(group.size() * num_experts)  # Gloo takes no matrix.
    work = None
    if counts.device.type == "cpu":
        # Gloo gathers around a ring, and each hop would wait behind transfers on the same links.
        work = dist.all_to_all_single(counts, counts_E.repeat(group.size()), group=group, async_op=True)
    else:
        dist.all_gather_into_tensor(counts, counts_E.contiguous(), group=group)
    return counts.view(-1, num_experts), [] if work is None else [work]
