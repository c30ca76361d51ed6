"""Moves experts from their owners to their replicas, and sums of gradients back, along a transfer plan.

One class runs both directions and all plans. The reference form of the paper (Hecate, §5.1: one broadcast and
one reduce for each expert among its holders) is a star plan in which an expert travels in one piece. The form
for production is a two-level plan in which experts travel in chunks. Both use point-to-point messages,
because a process group for each set of holders would have to be created again for every plan.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.failure_place import naming_failures
from megatron_fssdp.collectives.messages import receive, send, wait_for
from megatron_fssdp.collectives.sparse.transfer_cargo import Cargo, GatherCargo, ReductionCargo, check_cargo
from megatron_fssdp.collectives.sparse.wavefront import Wavefront
from megatron_fssdp.collectives.transfer_lane import (
    FinishedTransfer,
    PendingTransfer,
    Results,
    TransferTimer,
    run_on_stream,
    thread_lane,
)
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan

# Gloo posts a receive this many steps before its step, and a send can stay open for as many steps. Gloo's
# sender waits for the receiver, so early receives hide a round trip for each message. NCCL matches messages
# by order, so there the sends and receives of a step must be posted together.
_GLOO_LOOKAHEAD = 4

_GATHER, _REDUCE = 0, 1
_connected_groups: WeakSet[dist.ProcessGroup] = WeakSet()


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


class _Posting(NamedTuple):
    """A message to post.

    Attributes:
        is_receive: Whether to receive the message instead of sending it.
        tensor: Tensor to send or to fill.
        peer: Rank of the other device in the group.
        tag: Message tag.
    """

    is_receive: bool
    tensor: Tensor
    peer: int
    tag: int


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
        chunk_bytes: Size of a message in bytes; ``None`` moves an expert in one piece. On each device, a
            reduction needs this much memory for each child, and several times as much if it posts receives
            early.
        stream: CUDA stream of the transfers; ``None`` creates one. Unused on CPU.
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
        chunk_bytes: int | None = None,
        stream: torch.cuda.Stream | None = None,
        journal: list[StartedTransfer] | None = None,
        what: str = "experts",
    ) -> None:
        if plan.num_devices != dist.get_world_size(group):
            raise ValueError(
                f"the plan is for {plan.num_devices} devices, the group has {dist.get_world_size(group)}; "
                "make the plan for the size of the group"
            )
        if num_elements < 0 or (chunk_bytes is not None and chunk_bytes < 1):
            raise ValueError(
                f"got num_elements {num_elements} and chunk_bytes {chunk_bytes}: wanted num_elements >= 0 "
                "and chunk_bytes >= 1 or None"
            )
        self.group = group
        self.plan = plan
        self.rank = dist.get_rank(group)
        self.num_elements = num_elements
        self.dtype = dtype
        self.device = torch.device(device)
        self.chunk_bytes = chunk_bytes
        self._journal = journal
        self._what = what
        incoming, outgoing = plan.edges_of(self.rank)
        received = {edge.expert for edge in incoming}
        forwarded = {edge.expert for edge in outgoing}
        self.received_experts = tuple(sorted(received))
        """Experts that have a replica on this device, ascending; the plan brings them."""
        self.shared_experts = tuple(sorted(forwarded - received))
        """Experts that this device sends without receiving them, ascending; usually owned experts."""
        self._forwarded = frozenset(forwarded)
        self._stream = stream
        if self.device.type == "cuda":
            self._stream = stream or torch.cuda.Stream(self.device)
            _connect(group, self.device)

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
        chunk_elements = self._chunk_elements(self.dtype)
        wavefront = Wavefront.of_gather(self.plan, self.rank, self._num_chunks(chunk_elements))

        def run() -> Results:
            received = {
                e: out[e] if out is not None else self._empty(self.dtype) for e in self.received_experts
            }
            self._drive(wavefront, GatherCargo({**owned, **received}, chunk_elements), _GATHER)
            return received

        return self._start(run, wavefront, [*owned.values(), *(out or {}).values()], _GATHER, self.dtype)

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
        chunk_elements = self._chunk_elements(dtype)
        wavefront = Wavefront.of_reduction(self.plan, self.rank, self._num_chunks(chunk_elements))

        def run() -> Results:
            sums = {
                e: out[e] if out is not None else self._empty(result_dtype or dtype)
                for e in self.shared_experts
            }
            cargo = ReductionCargo(partial, sums, chunk_elements, dtype, self._forwarded.__contains__)
            self._drive(wavefront, cargo, _REDUCE)
            return sums

        return self._start(run, wavefront, [*partial.values(), *(out or {}).values()], _REDUCE, dtype)

    def _start(
        self,
        run: Callable[[], Results],
        wavefront: Wavefront,
        touched: list[Tensor],
        direction: int,
        dtype: torch.dtype,
    ) -> PendingTransfer:
        pending: PendingTransfer
        if wavefront.idle:
            pending = FinishedTransfer(run())
        elif self._stream is not None:
            pending = run_on_stream(run, self._stream, touched)
        else:
            pending = thread_lane(self.group).submit(run)
        if self._journal is not None:
            num_bytes = self.plan.total_bytes(self.num_elements * dtype.itemsize)
            self._journal.append(StartedTransfer(direction == _GATHER, num_bytes, pending.timer))
        return pending

    def _drive(self, wavefront: Wavefront, cargo: Cargo, direction: int) -> None:
        """Run a transfer to its end on the current thread or stream; errors name the transfer."""
        if wavefront.idle:
            return
        kind = "SparseAllGather" if direction == _GATHER else "SparseReduceScatter"
        with naming_failures(f"{kind} of {self._what}"):
            self._drive_steps(wavefront, cargo, direction)

    def _drive_steps(self, wavefront: Wavefront, cargo: Cargo, direction: int) -> None:
        # Post the steps in order, and wait only for what the next messages to pass on need.
        lookahead = 0 if self.device.type == "cuda" else _GLOO_LOOKAHEAD
        open_sends: deque[list[dist.Work]] = deque()
        for t in range(-lookahead, wavefront.num_steps + 1):
            receives = wavefront.step(t + lookahead).receives
            buffers = [cargo.receive_buffer(message) for message in receives]
            postings = [
                _Posting(True, buffer, message.peer, 2 * message.expert + direction)
                for message, buffer in zip(receives, buffers, strict=True)
            ]
            postings += [
                _Posting(False, cargo.outgoing(message), message.peer, 2 * message.expert + direction)
                for message in wavefront.step(t).sends
            ]
            works = _post(postings, self.group, self.device)
            for message, buffer, work in zip(receives, buffers, works[: len(receives)], strict=True):
                cargo.expect(message, buffer, work)
            open_sends.append(works[len(receives) :])
            if len(open_sends) > lookahead + 1:
                wait_for(open_sends.popleft())
            for message in wavefront.step(t - 1).receives:
                cargo.settle(message.expert, message.chunk)
        for works in open_sends:
            wait_for(works)

    def _chunk_elements(self, dtype: torch.dtype) -> int:
        if self.chunk_bytes is None:
            return max(1, self.num_elements)
        return max(1, min(self.num_elements, self.chunk_bytes // dtype.itemsize))

    def _num_chunks(self, chunk_elements: int) -> int:
        return -(-self.num_elements // chunk_elements)

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.num_elements, dtype=dtype, device=self.device)


def _post(messages: list[_Posting], group: dist.ProcessGroup, device: torch.device) -> list[dist.Work]:
    """Post messages together and return one work handle for each, even if the backend has one for all."""
    if not messages:
        return []
    if device.type != "cuda":
        # Gloo has no batches, and single messages cost the host less time.
        return [
            (receive if message.is_receive else send)(message.tensor, message.peer, group, message.tag)
            for message in messages
        ]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(
                dist.irecv if message.is_receive else dist.isend,
                message.tensor,
                group=group,
                tag=message.tag,
                group_peer=message.peer,
            )
            for message in messages
        ]
    )
    return works if len(works) == len(messages) else works[:1] * len(messages)


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect all ranks of an NCCL group once, because the first batch of messages can involve only some."""
    if group not in _connected_groups:
        _connected_groups.add(group)
        dist.all_reduce(torch.zeros(1, device=device), group=group)
