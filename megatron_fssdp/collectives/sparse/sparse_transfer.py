"""Moves experts from their owners to their replicas, and sums of gradients back, along a transfer plan.

One class runs both directions and all plans. The reference form of the paper (Hecate, §5.1: one broadcast and
one reduce for each expert among its holders) is a star plan in which an expert travels in one piece. The form
for production is a two-level plan in which experts travel in chunks. Both use point-to-point messages,
because a process group for each set of holders would have to be created again for every plan.
"""

from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.failure_place import naming_failures
from megatron_fssdp.collectives.messages import GLOO, NCCL, Poster, Posting, connect_pairs, wait_for
from megatron_fssdp.collectives.sparse.transfer_cargo import Cargo, GatherCargo, ReductionCargo, check_cargo
from megatron_fssdp.collectives.sparse.wavefront import Wavefront
from megatron_fssdp.collectives.stream_lane import Steps, stream_lane
from megatron_fssdp.collectives.transfer_lane import (
    FinishedTransfer,
    PendingTransfer,
    Results,
    TransferTimer,
    thread_lane,
)
from megatron_fssdp.planning.transfer.message_size import MessageRule, gather_stages, reduction_stages
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan

_GATHER, _REDUCE = 0, 1


@dataclass(frozen=True)
class StartedTransfer:
    """Record of one call of a :class:`SparseTransfer`, for measurements.

    Attributes:
        is_gather: Whether the call was a SparseAllGather; otherwise it was a SparseReduceScatter.
        num_bytes: Bytes that the call moves between all devices in total.
        timer: Timer that gives the duration of the transfer after its ``wait``.
    """

    is_gather: bool
    num_bytes: int
    timer: TransferTimer


class SparseTransfer:
    """The transfers of one layer: a transfer plan, bound to a process group.

    Every rank of the group must make the same calls in the same order, even if it has nothing to send.
    Between the start of a transfer and its wait, nothing else must use the group.

    Experts travel in chunks, and a device passes a chunk on as soon as it has arrived. Two chunks of one
    expert on the path owner 0 → device 4 → device 5::

        step                  0           1           2
        edge 0 → 4 (depth 0)  chunk 0     chunk 1
        edge 4 → 5 (depth 1)              chunk 0     chunk 1

    SparseReduceScatter uses the same edges in the opposite direction, beginning with the deepest ones. Each
    device on the path adds its own part of a chunk before it passes the sum on. See ``wavefront.py``.

    Args:
        group: Process group of the expert-parallel ranks; device numbers of the plan are ranks in it.
        plan: Edges along which each expert travels.
        num_elements: Number of elements of one expert's flat tensor.
        dtype: Data type of gathered experts. Gradients can have another one.
        device: Device of all tensors.
        messages: How an expert is divided into messages; ``None`` moves it in one piece. On each device, a
            reduction needs ``messages.buffered_bytes`` for each child.
        one_queue: Whether the CUDA device runs the kernels of all streams in the order of their issue
            (``CUDA_DEVICE_MAX_CONNECTIONS=1``). A transfer then issues its batches at several points of the
            program (``stream_lane.py``), as many at each point as the plan has hops on its longest path.
            Equal on all ranks. Unused on CPU.
        poster: How messages are posted; ``None`` posts them as the device's communication library needs it.
        journal: List to which every started transfer is appended.
        what: Name of the moved experts in error messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        plan: TransferPlan,
        *,
        num_elements: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        messages: MessageRule | None = None,
        one_queue: bool = False,
        poster: Poster | None = None,
        journal: list[StartedTransfer] | None = None,
        what: str = "experts",
    ) -> None:
        if plan.num_devices != dist.get_world_size(group):
            raise ValueError(
                f"the plan is for {plan.num_devices} devices, the group has {dist.get_world_size(group)}; "
                "make the plan for the size of the group"
            )
        if num_elements < 0:
            raise ValueError(f"num_elements is {num_elements}: wanted 0 or more")
        self.group, self.plan, self.rank = group, plan, dist.get_rank(group)
        self.num_elements, self.dtype, self.device = num_elements, dtype, torch.device(device)
        self.messages, self._journal, self._what = messages, journal, what
        received, forwarded = ({edge.expert for edge in edges} for edges in plan.edges_of(self.rank))
        self.received_experts = tuple(sorted(received))
        """Experts that have a replica on this device, ascending; the plan brings them."""
        self.shared_experts = tuple(sorted(forwarded - received))
        """Experts that this device sends without receiving them, ascending; usually owned experts."""
        self._forwarded = forwarded
        self._poster = poster or (NCCL if self.device.type == "cuda" else GLOO)
        self._one_queue = one_queue
        if self.device.type == "cuda":
            connect_pairs(group, self.device)

    def start_all_gather(
        self, owned: Mapping[int, Tensor], *, out: Mapping[int, Tensor] | None = None
    ) -> PendingTransfer:
        """Start SparseAllGather, which brings this rank's replicas.

        Args:
            owned: Flat tensors ``[num_elements]`` of :attr:`shared_experts`. The caller must not write to
                them before the wait.
            out: Flat tensors ``[num_elements]`` of :attr:`received_experts` to fill; ``None`` allocates them.

        Returns:
            A handle whose ``wait()`` returns the flat tensors of :attr:`received_experts`.

        Raises:
            ValueError: The tensors do not fit the experts, shape, dtype or device of the transfer.
        """
        check_cargo(owned, self.shared_experts, self.num_elements, self.dtype, self.device, "owned")
        if out is not None:
            check_cargo(out, self.received_experts, self.num_elements, self.dtype, self.device, "out")
        chunk_elements = self._chunk_elements(self.dtype, gather_stages(self.plan.max_depth + 1))
        wavefront = Wavefront.of_gather(self.plan, self.rank, self._num_chunks(chunk_elements))
        received = {e: self._empty(self.dtype) for e in self.received_experts} if out is None else dict(out)
        cargo = GatherCargo({**owned, **received}, chunk_elements)
        return self._start(wavefront, cargo, _GATHER, self.dtype, received, owned)

    def start_reduce_scatter(
        self,
        partial: Mapping[int, Tensor],
        *,
        dtype: torch.dtype | None = None,
        result_dtype: torch.dtype | None = None,
        out: Mapping[int, Tensor] | None = None,
    ) -> PendingTransfer:
        """Start SparseReduceScatter, which sums the parts of every expert at its owner.

        A device on the path adds the received parts to its own part. The order of a sum is the device's own
        part first, then the others in the order of the plan. Parts in bf16 and fp16 are added in fp32, and
        the sum is rounded when it is passed on. Parts in fp32 avoid this rounding and need twice the bytes.

        Args:
            partial: Flat tensors ``[num_elements]`` of :attr:`received_experts`. Add those of
                :attr:`shared_experts` if the sums include the owner's own part. All ranks use the same dtype.
                The caller must not write to the tensors before the wait.
            dtype: Data type of the parts; ``None`` takes it from ``partial``. Owners without parts of their
                own need it if it differs from the transfer's ``dtype``.
            result_dtype: Data type of the sums; ``None`` for that of the parts.
            out: Flat tensors ``[num_elements]`` of :attr:`shared_experts`, of any dtype, to fill with the
                sums; ``None`` allocates them.

        Returns:
            A handle whose ``wait()`` returns the sums of :attr:`shared_experts` over all holders that gave a
            part.

        Raises:
            ValueError: The tensors do not fit the experts, shape, dtype or device of the transfer.
        """
        held = {*self.received_experts, *(expert for expert in self.shared_experts if expert in partial)}
        if dtype is None:
            dtype = next((tensor.dtype for tensor in partial.values()), self.dtype)
        check_cargo(partial, held, self.num_elements, dtype, self.device, "partial")
        if out is not None:
            check_cargo(out, self.shared_experts, self.num_elements, result_dtype, self.device, "out")
        chunk_elements = self._chunk_elements(dtype, reduction_stages(self.plan.max_depth + 1))
        wavefront = Wavefront.of_reduction(self.plan, self.rank, self._num_chunks(chunk_elements))

        sums_dtype = result_dtype or dtype
        sums = {e: self._empty(sums_dtype) for e in self.shared_experts} if out is None else dict(out)
        cargo = ReductionCargo(partial, sums, chunk_elements, dtype, self._forwarded.__contains__)
        return self._start(wavefront, cargo, _REDUCE, dtype, sums, partial)

    def _start(
        self,
        wavefront: Wavefront,
        cargo: Cargo,
        direction: int,
        dtype: torch.dtype,
        results: Results,
        sources: Mapping[int, Tensor],
    ) -> PendingTransfer:
        # The results are allocated here and not on the lane, so that their memory belongs to the stream that
        # waits for them.
        pending: PendingTransfer
        steps = self._steps(wavefront, cargo, direction, results)
        on_cuda = self.device.type == "cuda"
        # With one queue, ranks without messages must issue the transfers of the lane in the same order.
        if not self.plan.edges or (wavefront.idle and not (on_cuda and self._one_queue)):
            pending = FinishedTransfer(results)
        elif on_cuda:
            pending = stream_lane(self.group, self.device).submit(
                steps,
                wavefront.num_steps,
                self.plan.max_depth + 1 if self._one_queue else None,
                [*sources.values(), *results.values()],
            )
        else:
            pending = thread_lane(self.group).submit(lambda: _drain(steps))
        if self._journal is not None:
            num_bytes = self.plan.total_bytes(self.num_elements * dtype.itemsize)
            self._journal.append(StartedTransfer(direction == _GATHER, num_bytes, pending.timer))
        return pending

    def _steps(self, wavefront: Wavefront, cargo: Cargo, direction: int, results: Results) -> Steps:
        """Run a transfer on the current thread or stream, and stop after each step; errors name it."""
        kind = "SparseAllGather" if direction == _GATHER else "SparseReduceScatter"
        with naming_failures(f"{kind} of {self._what}"):
            yield from self._post_steps(wavefront, cargo, direction)
        return results

    def _post_steps(self, wavefront: Wavefront, cargo: Cargo, direction: int) -> Generator[None]:
        # Post the steps in order, and wait only for what the next messages to pass on need.
        lookahead = self._poster.lookahead
        open_sends: deque[list[dist.Work]] = deque()
        for t in range(-lookahead, wavefront.num_steps + 1):
            receives = wavefront.step(t + lookahead).receives
            buffers = [cargo.receive_buffer(message) for message in receives]
            postings = [
                Posting(True, buffer, message.peer, 2 * message.expert + direction)
                for message, buffer in zip(receives, buffers, strict=True)
            ]
            postings += [
                Posting(False, cargo.outgoing(message), message.peer, 2 * message.expert + direction)
                for message in wavefront.step(t).sends
            ]
            works = self._poster.post(postings, self.group)
            for message, buffer, work in zip(receives, buffers, works[: len(receives)], strict=True):
                cargo.expect(message, buffer, work)
            open_sends.append(works[len(receives) :])
            if t in range(wavefront.num_steps):
                yield
            # What follows waits on the transfer's stream for the step that has been posted before this one.
            if len(open_sends) > lookahead + 1:
                wait_for(open_sends.popleft())
            for message in wavefront.step(t - 1).receives:
                cargo.settle(message.expert, message.chunk)
        for works in open_sends:
            wait_for(works)

    def _chunk_elements(self, dtype: torch.dtype, num_stages: int) -> int:
        if self.messages is None:
            return max(1, self.num_elements)
        message_bytes = self.messages.message_bytes(self.num_elements * dtype.itemsize, num_stages)
        return max(1, message_bytes // dtype.itemsize)

    def _num_chunks(self, chunk_elements: int) -> int:
        return -(-self.num_elements // chunk_elements)

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.num_elements, dtype=dtype, device=self.device)


def _drain(steps: Steps) -> Results:
    """Run a transfer to its end, and return its results."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(Results, end.value)
