"""Moves experts from their owners to their replicas, and sums of gradients back, along a transfer plan.

One class runs both directions and all plans: the star of the paper's reference form (Hecate, §5.1: one
broadcast and one reduce for each expert among its holders), and two-level plans in which experts travel in
chunks. They use point-to-point messages, because a process group for each set of holders would have to be
created again for every plan.

In step ``t``, an edge of depth ``k`` carries chunk ``t - k`` of its expert. A device therefore passes a chunk
on in the step after its arrival, and all levels of a tree work at the same time. For three chunks and the
tree 0 → 4 → {5, 6}::

    step                       0        1        2        3
    edge 0 → 4   (depth 0)     chunk 0  chunk 1  chunk 2
    edge 4 → 5   (depth 1)              chunk 0  chunk 1  chunk 2
    edge 4 → 6   (depth 1)              chunk 0  chunk 1  chunk 2

The reduction is the mirror image: the edges carry chunks in the opposite direction, and in a plan of depth
``K`` an edge of depth ``k`` carries chunk ``t - (K - k)``.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.failure_place import naming_failures
from megatron_fssdp.collectives.messages import Posting, connect_pairs, post, wait_for
from megatron_fssdp.collectives.sparse.transfer_cargo import GatherCargo, ReductionCargo
from megatron_fssdp.collectives.transfer_lanes import (
    PendingTransfer,
    Results,
    Steps,
    TransferTimer,
    stream_lane,
    thread_lane,
)
from megatron_fssdp.planning.transfer.message_size import MessageRule, num_stages
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan


class Message(NamedTuple):
    """One chunk of one expert that a device sends to or receives from a peer, a rank of the group."""

    peer: int
    expert: int
    chunk: int


class Step(NamedTuple):
    """Messages that a device posts together; any two devices list their common messages in the same order."""

    sends: list[Message]
    receives: list[Message]


def num_steps(plan: TransferPlan, num_chunks: int) -> int:
    """Number of steps of a transfer, equal on all devices; some can be empty on a device."""
    return num_chunks + plan.max_depth if num_chunks else 0


def steps_of(plan: TransferPlan, device: int, num_chunks: int, *, is_gather: bool) -> list[Step]:
    """The steps of a device in SparseAllGather, or in SparseReduceScatter."""
    steps = [Step([], []) for _ in range(num_steps(plan, num_chunks))]
    incoming, outgoing = plan.edges_of(device)
    for edges, is_source in ((outgoing, True), (incoming, False)):
        for edge in edges:
            peer = edge.destination if is_source else edge.source
            delay = edge.depth if is_gather else plan.max_depth - edge.depth
            for chunk in range(num_chunks):
                step = steps[delay + chunk]
                messages = step.sends if is_source == is_gather else step.receives
                messages.append(Message(peer, edge.expert, chunk))
    return steps


class SparseTransfer:
    """The transfers of one layer: a transfer plan, bound to a process group.

    Every rank of the group must make the same calls in the same order, even if it has nothing to send.
    Between the start of a transfer and its wait, nothing else must use the group.

    The ranks of the group are the devices of the plan. An expert is a flat tensor of ``num_elements``, and
    ``dtype`` is that of gathered experts; gradients can have another one. ``messages`` divides an expert, and
    a reduction needs ``messages.buffered_bytes`` for each child on a device. If the device runs the kernels
    of all streams in the order of their issue (``one_queue``, equal on all ranks, unused on CPU), a transfer
    issues at each point of the program (``transfer_lanes.py``) as many batches as the plan has hops on its
    longest path. ``journal`` gets the timer of every started transfer, and ``what`` names the experts in
    error messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        plan: TransferPlan,
        *,
        num_elements: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        messages: MessageRule,
        one_queue: bool = False,
        journal: list[TransferTimer] | None = None,
        what: str = "experts",
    ) -> None:
        self.group, self.plan, self.rank = group, plan, group.rank()
        self.num_elements, self.dtype, self.device = num_elements, dtype, torch.device(device)
        self.messages, self._journal, self._what = messages, journal, what
        received, forwarded = ({edge.expert for edge in edges} for edges in plan.edges_of(self.rank))
        self.received_experts = tuple(sorted(received))  # that have a replica on this device
        self.shared_experts = tuple(sorted(forwarded - received))  # sent, but not received; usually owned
        self._on_cuda = self.device.type == "cuda"
        self._one_queue = one_queue and self._on_cuda
        if self._on_cuda:
            connect_pairs(group, self.device)

    def start_all_gather(
        self,
        owned: Mapping[int, Tensor],
        *,
        out: Mapping[int, Tensor] | None = None,
        fill: Callable[[], object] = lambda: None,
    ) -> PendingTransfer:
        """Start SparseAllGather. Its ``wait()`` returns this rank's replicas, flat tensors by expert.

        ``owned`` has flat tensors ``[num_elements]`` of :attr:`shared_experts`, to which the caller must not
        write before the wait. The lane calls ``fill``, which fills them, before it sends. ``out`` has tensors
        of :attr:`received_experts` to fill; ``None`` allocates them.
        """
        received = self._new(self.received_experts, self.dtype) if out is None else dict(out)
        chunk_elements = self._chunk_elements(self.dtype, num_stages(self.plan.max_depth + 1, adds=False))
        cargo = GatherCargo({**owned, **received}, chunk_elements)
        return self._start(cargo, chunk_elements, self.dtype, received, owned.values(), before=fill)

    def start_reduce_scatter(
        self,
        partial: Mapping[int, Tensor],
        *,
        dtype: torch.dtype | None = None,
        out: Mapping[int, Tensor] | None = None,
        then: Callable[[], object] = lambda: None,
    ) -> PendingTransfer:
        """Start SparseReduceScatter. Its ``wait()`` returns the sums of :attr:`shared_experts` by expert.

        A device on the path adds the received parts to its own part (:class:`ReductionCargo`). Parts in fp32
        avoid the rounding of sums that are passed on, and need twice the bytes.

        ``partial`` has flat tensors ``[num_elements]`` of :attr:`received_experts`, and of
        :attr:`shared_experts` if the sums include the owner's own part. The caller must not write to them
        before the wait. ``dtype`` is that of the parts, equal on all ranks; by default that of the experts.
        ``out`` has tensors to fill with the sums, of any dtype; ``None`` allocates them. Where sums end, the
        lane calls ``then`` after the last one.
        """
        dtype = dtype or self.dtype
        sums = self._new(self.shared_experts, dtype) if out is None else dict(out)
        chunk_elements = self._chunk_elements(dtype, num_stages(self.plan.max_depth + 1, adds=True))
        cargo = ReductionCargo(partial, sums, chunk_elements, dtype)
        return self._start(cargo, chunk_elements, dtype, sums, partial.values(), after=then)

    def _start(
        self,
        cargo: GatherCargo,
        chunk_elements: int,
        dtype: torch.dtype,
        results: Results,
        sources: Iterable[Tensor],
        **at_ends: Callable[[], object],
    ) -> PendingTransfer:
        # The results are allocated by the callers and not on the lane, so that their memory belongs to the
        # stream that waits for them.
        num_chunks = -(-self.num_elements // chunk_elements)
        is_idle = not num_chunks or not (self.received_experts or self.shared_experts)
        timer = TransferTimer(cargo.is_gather, len(self.plan.table) * self.num_elements * dtype.itemsize)
        if self._journal is not None:
            self._journal.append(timer)
        # With one queue, ranks without messages must issue the transfers of the lane in the same order.
        if not self.plan.edges or (is_idle and not self._one_queue):
            return PendingTransfer(timer, results)
        steps = self._steps(cargo, num_chunks, results, **at_ends)
        if not self._on_cuda:
            return thread_lane(self.group).submit(steps, timer)
        at_once = self.plan.max_depth + 1 if self._one_queue else None
        touched = [*sources, *results.values()]
        lane = stream_lane(self.group, self.device)
        return lane.submit(steps, timer, num_steps(self.plan, num_chunks), at_once, touched)

    def _steps(
        self,
        cargo: GatherCargo,
        num_chunks: int,
        results: Results,
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> Steps:
        """Post the steps in order, and wait only for what the next messages to pass on need."""
        operation = "SparseAllGather" if cargo.is_gather else "SparseReduceScatter"
        with naming_failures(f"{operation} of {self._what}"):
            before()
            steps = steps_of(self.plan, self.rank, num_chunks, is_gather=cargo.is_gather)
            # Steps by which a receive is posted early, and for which a send can stay open. Gloo's sender
            # waits for the receiver, so early receives hide a round trip for each message.
            lookahead = 0 if self._on_cuda else 4
            open_sends: deque[list[dist.Work]] = deque()
            for t in range(-lookahead, len(steps) + 1):
                receives = steps[t + lookahead].receives if t + lookahead < len(steps) else []
                sends = steps[t].sends if 0 <= t < len(steps) else []
                buffers = [cargo.receive_buffer(expert, chunk) for _, expert, chunk in receives]
                tensors = [*buffers, *(cargo.outgoing(expert, chunk) for _, expert, chunk in sends)]
                postings = [
                    Posting(n < len(receives), tensor, one.peer, 2 * one.expert + (not cargo.is_gather))
                    for n, (one, tensor) in enumerate(zip([*receives, *sends], tensors, strict=True))
                ]
                works = post(postings, self.group, in_batch=self._on_cuda)
                for message, buffer, work in zip(receives, buffers, works, strict=False):
                    cargo.inbox[message.expert, message.chunk].append((buffer, work))
                open_sends.append(works[len(receives) :])
                if 0 <= t < len(steps):
                    yield
                # What follows waits on the transfer's stream for the step that was posted before this one.
                if len(open_sends) > lookahead + 1:
                    wait_for(open_sends.popleft())
                for message in steps[t - 1].receives if 0 < t <= len(steps) else []:
                    cargo.settle(message.expert, message.chunk)
            for works in open_sends:
                wait_for(works)
            if results:
                after()
        return results

    def _chunk_elements(self, dtype: torch.dtype, num_stages: int) -> int:
        message_bytes = self.messages.message_bytes(self.num_elements * dtype.itemsize, num_stages)
        return max(1, message_bytes // dtype.itemsize)

    def _new(self, experts: Iterable[int], dtype: torch.dtype) -> Results:
        return {e: torch.empty(self.num_elements, dtype=dtype, device=self.device) for e in experts}
