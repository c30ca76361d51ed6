"""Moves experts from their owners to their replicas, and sums of gradients back, along a plan.

One executor serves both directions and all plans. The reference form of the paper
(Hecate, §5.1: a broadcast and a reduce per expert among its holders) is a star plan in one
piece; it is written with point-to-point messages because process groups per set of holders
would have to be made anew with every plan. The product's form is a two-level plan in chunks.
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

# How many steps before its turn a receive is posted, and for how long a send may stay open.
# Gloo's sender waits for the receiver, so looking ahead hides a round trip per message. NCCL
# matches messages by order, so there the sends and receives of a step must go together.
_GLOO_LOOKAHEAD = 4

_GATHER, _REDUCE = 0, 1
_connected_groups: WeakSet[dist.ProcessGroup] = WeakSet()


@dataclass(frozen=True)
class StartedTransfer:
    """One call of a :class:`SparseTransfer`, for those who count.

    Attributes:
        is_gather: SparseAllGather, else SparseReduceScatter.
        num_bytes: Bytes that it moves between all devices together.
        timer: Knows how long it took, once it has been waited for.
    """

    is_gather: bool
    num_bytes: int
    timer: TransferTimer


class _Posting(NamedTuple):
    """A message to be posted; the peer is a rank in the group."""

    is_receive: bool
    tensor: Tensor
    peer: int
    tag: int


class SparseTransfer:
    """One layer's transfers: a plan bound to a process group.

    Every rank of the group must make the same calls in the same order, also where it has
    nothing to send. Transfers that are started and not waited for need a group that nobody
    else uses in the meantime.

    Args:
        group: The expert-parallel group; device numbers of the plan are ranks in it.
        plan: Which edges each expert travels along.
        num_elements: Elements of one expert's flat tensor.
        dtype: Dtype of gathered experts. Gradients may have another one.
        device: Device of all tensors.
        chunk_bytes: Size of a message; None moves an expert in one piece. A reduction holds up
            to this much memory per child, several times over where it looks ahead.
        stream: CUDA stream to run on; None takes a new one. Unused on CPU.
        journal: Receives every transfer that is started.
        what: Names what is moved, in errors.
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
                "plan for the group's size"
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
        """The replicas here: the plan brings them."""
        self.shared_experts = tuple(sorted(forwarded - received))
        """The owned experts that have replicas elsewhere."""
        self._forwarded = frozenset(forwarded)
        self._stream = stream
        if self.device.type == "cuda":
            self._stream = stream or torch.cuda.Stream(self.device)
            _connect(group, self.device)

    def start_all_gather(
        self, owned: Mapping[int, Tensor], *, out: Mapping[int, Tensor] | None = None
    ) -> PendingTransfer:
        """Start to bring the replicas of this rank here.

        Args:
            owned: Flat tensors of :attr:`shared_experts`; not to be written before the wait.
            out: Flat tensors of :attr:`received_experts` to receive into; None allocates.

        Returns:
            A handle whose ``wait()`` gives the flat tensors of :attr:`received_experts`.
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
        """Start to sum every expert's parts at its owner.

        A device on the way adds what it got to its own part: its own first, then the others
        in the order of the plan; bf16 and fp16 in fp32, rounded when the sum is passed on.
        Parts in fp32 avoid that rounding and cost twice the bytes.

        Args:
            partial: Flat tensors of :attr:`received_experts`, and of :attr:`shared_experts` where an
                owner's own part belongs to the sums; of one dtype on all ranks; not to be written
                before the wait.
            dtype: That dtype, by default the one of ``partial``; to be told to owners without parts.
            result_dtype: Dtype of the sums; None for that of the parts.
            out: Flat tensors of :attr:`shared_experts` to write the sums into, of any dtype;
                None allocates.

        Returns:
            A handle whose ``wait()`` gives the sums of :attr:`shared_experts`, over all holders that
            gave a part.
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
        """Post the steps in order; never wait for more than the next message to pass on needs."""
        if wavefront.idle:
            return
        kind = "SparseAllGather" if direction == _GATHER else "SparseReduceScatter"
        with naming_failures(f"{kind} of {self._what}"):
            self._drive_steps(wavefront, cargo, direction)

    def _drive_steps(self, wavefront: Wavefront, cargo: Cargo, direction: int) -> None:
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
    """Post messages together; one work a message, even where the backend has one for all."""
    if not messages:
        return []
    if device.type != "cuda":
        # Gloo knows no batches, and one by one costs the host less.
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
    """Make NCCL's connections once, with all ranks: a first batch of messages may leave some out."""
    if group not in _connected_groups:
        _connected_groups.add(group)
        dist.all_reduce(torch.zeros(1, device=device), group=group)
