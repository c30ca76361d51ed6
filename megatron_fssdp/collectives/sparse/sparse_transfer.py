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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.messages import connect_pairs, naming_failures, start_exchange, wait_for
from megatron_fssdp.collectives.sparse.peer_memory import NO_PUTS, WeightPuts
from megatron_fssdp.collectives.sparse.transfer_cargo import (
    Arrivals,
    GatherCargo,
    Message,
    Parts,
    ReductionCargo,
)
from megatron_fssdp.collectives.transfer_lanes import (
    PendingTransfer,
    Steps,
    TransferTimer,
    stream_lane,
    thread_lane,
)
from megatron_fssdp.planning.transfer.message_size import MessageRule
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan


class Step(NamedTuple):
    """Messages that a device posts together; any two devices list their common messages in the same order."""

    sends: list[Message]
    receives: list[Message]


def steps_of(plan: TransferPlan, device: int, num_chunks: int, *, is_gather: bool) -> list[Step]:
    """The steps of a device in SparseAllGather, or in SparseReduceScatter: as many on all devices."""
    steps = [Step([], []) for _ in range(num_chunks + plan.max_depth if num_chunks else 0)]
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

    The ranks of the group are the devices of the plan. An expert consists of tensors of ``sizes`` elements,
    which need not lie together: a message is sent in pieces that end where they do. So all ranks need the
    same ``sizes``. The ``elements`` that travel are by default all. ``dtype`` is that of gathered experts;
    gradients can have another one. ``messages`` divides an expert, and a reduction needs
    ``messages.buffered_bytes`` for each child on a device. ``is_far`` says whether the plan crosses nodes.

    If the device runs the kernels of all streams in the order of their issue (``one_queue``, equal on all
    ranks, unused on CPU), a transfer issues at each point of the program (``transfer_lanes.py``) as many
    batches as the plan has hops on its longest path. ``journal`` gets the timer of every started transfer,
    and ``name`` names the experts in error messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        plan: TransferPlan,
        *,
        sizes: Sequence[int],
        elements: range | None = None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        messages: MessageRule,
        is_far: bool = False,
        one_queue: bool = False,
        journal: list[TransferTimer] | None = None,
        name: str = "experts",
    ) -> None:
        self.group, self.plan, self.rank = group, plan, group.rank()
        self.sizes, self.elements = sizes, range(sum(sizes)) if elements is None else elements
        self.dtype, self.device = dtype, torch.device(device)
        self._messages, self._is_far, self._journal, self._name = messages, is_far, journal, name
        received, forwarded = ({edge.expert for edge in edges} for edges in plan.edges_of(self.rank))
        self.received_experts = tuple(sorted(received))  # that have a replica on this device
        self.shared_experts = tuple(sorted(forwarded - received))  # sent, but not received; usually owned
        self._passed_on = received & forwarded
        self._on_cuda = self.device.type == "cuda"
        self._one_queue = one_queue and self._on_cuda

    def start_all_gather(self, contents: Mapping[int, Parts], puts: WeightPuts = NO_PUTS) -> PendingTransfer:
        """Start SparseAllGather from :attr:`shared_experts` into :attr:`received_experts`.

        ``contents`` has the contiguous tensors of these experts. Until the wait, the caller must not write to
        what is sent, nor use what is received. Hops to ``puts.peers`` are puts; what these receive must be in
        the slots that ``puts`` knows.
        """
        chunk_elements = self._chunk_elements(self.dtype)
        cargo = GatherCargo(contents, self.elements, chunk_elements)
        touched = [tensor for parts in contents.values() for tensor in parts]
        return self._start(cargo, chunk_elements, self.dtype, touched, puts)

    def start_reduce_scatter(
        self, partial: Mapping[int, Parts], totals: Mapping[int, Parts], *, dtype: torch.dtype | None = None
    ) -> PendingTransfer:
        """Start SparseReduceScatter, which adds the parts of all replicas to the owners' ``totals``.

        A device on the path adds the received parts to its own part (:class:`ReductionCargo`). Parts that
        travel in fp32 avoid the rounding of sums that are passed on, and need twice the bytes.

        ``partial`` has the tensors of :attr:`received_experts`, to which the caller must not write before the
        wait. ``totals`` has those of :attr:`shared_experts`, contiguous and of any dtype and borders; nothing
        else must use them before the wait. ``dtype`` is that of the messages, equal on all ranks; by default
        that of the experts.
        """
        dtype = dtype or self.dtype
        chunk_elements = self._chunk_elements(dtype, self.plan.most_sent)
        kind = self.sizes, dtype, self.device
        cargo = ReductionCargo(partial, totals, self.elements, chunk_elements, *kind)
        touched = [
            part for parts in (*partial.values(), *totals.values()) for part in parts if not part.is_meta
        ]
        return self._start(cargo, chunk_elements, dtype, touched)

    def _start(
        self,
        cargo: GatherCargo,
        chunk_elements: int,
        dtype: torch.dtype,
        touched: Iterable[Tensor],
        puts: WeightPuts = NO_PUTS,
    ) -> PendingTransfer:
        num_chunks = -(-len(self.elements) // chunk_elements)
        is_idle = not num_chunks or not (self.received_experts or self.shared_experts)
        timer = TransferTimer(cargo.is_gather, len(self.plan.table) * len(self.elements) * dtype.itemsize)
        if self._journal is not None:
            self._journal.append(timer)
        if not len(self.plan.table):
            return PendingTransfer(timer)
        if self._on_cuda:
            connect_pairs(self.group, self.device)  # also on idle ranks
        # With one queue, ranks without messages must issue the transfers of the lane in the same order.
        if is_idle and not self._one_queue:
            return PendingTransfer(timer)
        steps = self._steps(cargo, num_chunks, puts)
        if not self._on_cuda:
            return thread_lane(self.group).submit(steps, timer)
        at_once = self.plan.max_depth + 1 if self._one_queue else None
        return stream_lane(self.group, self.device).submit(steps, timer, at_once, touched)

    def _steps(self, cargo: GatherCargo, num_chunks: int, puts: WeightPuts) -> Steps:
        """Post the steps in order, and wait only for what the next messages to pass on need."""
        operation = "SparseAllGather" if cargo.is_gather else "SparseReduceScatter"
        # Experts whose messages a device has to receive before it sends its own.
        passed_on = self._passed_on if cargo.is_gather else set(self.received_experts)
        with naming_failures(f"{operation} of {self._name}"):
            steps = steps_of(self.plan, self.rank, num_chunks, is_gather=cargo.is_gather)
            ended = dict[int, None]()
            incoming, leaving = self.plan.edges_of(self.rank)
            puts.open({edge.source for edge in incoming}, {edge.destination for edge in leaving})
            in_turn = self._on_cuda or puts is not NO_PUTS
            # Steps by which a receive is posted early, and for which a send can stay open. Gloo's sender
            # waits for the receiver, so early receives hide a round trip for each message.
            lookahead = 0 if in_turn else 4
            arriving: deque[list[Arrivals]] = deque()
            open_sends: deque[tuple[list[dist.Work], list[list[Tensor]]]] = deque()
            for t in range(-lookahead, len(steps) + 1):
                receives = steps[t + lookahead].receives if t + lookahead < len(steps) else []
                before = arriving.popleft() if len(arriving) > lookahead else []
                # What is sent on comes first. On CUDA, the memory of all serves the next step.
                first = before if in_turn else before[:1]
                puts.await_step(ended)
                ended = dict.fromkeys(message.peer for message in receives if message.peer in puts.peers)
                for arrived in first:
                    cargo.settle(arrived)
                both = [
                    cargo.arrivals([of for of in receives if (of.expert in passed_on) == is_passed])
                    for is_passed in (True, False)
                ]
                arriving.append(both)
                sends = steps[t].sends if 0 <= t < len(steps) else []
                outgoing = cargo.outgoing(sends)
                received, sent = list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()
                works_of = list[list[dist.Work]]()
                for message in receives:
                    arrived = both[message.expert not in passed_on]
                    for piece in [] if message.peer in ended else arrived.pieces[message]:
                        received.append((message.peer, piece))
                        works_of.append(arrived.works)
                copied: dict[int, list[tuple[Tensor, Tensor]]] = {}
                for message, pieces in zip(sends, outgoing, strict=True):
                    if message.peer in puts.peers:
                        slot = puts.slot(message.peer, message.expert).split(list(self.sizes))
                        pairs = copied.setdefault(message.peer, [])
                        pairs += zip(cargo.cut(slot, message.chunk), pieces, strict=True)
                    else:
                        sent += [(message.peer, piece) for piece in pieces]
                of_received, of_sent = start_exchange(sent, received, self.group)
                for works, work in zip(works_of, of_received, strict=True):
                    works.append(work)
                puts.put(copied)
                open_sends.append((of_sent, outgoing))
                if 0 <= t < len(steps):
                    yield t + 1 < len(steps)
                # What follows waits on the transfer's stream for the step that was posted before this one.
                if len(open_sends) > lookahead + 1:
                    wait_for(open_sends.popleft()[0])
                for arrived in before[len(first) :]:
                    cargo.settle(arrived)
            for works, _ in open_sends:
                wait_for(works)

    def _chunk_elements(self, dtype: torch.dtype, num_received: int = 0) -> int:
        num_bytes, hops = len(self.elements) * dtype.itemsize, self.plan.max_depth + 1
        how: Any = {"is_far": self._is_far, "num_received": num_received}
        return max(1, self._messages.message_bytes(num_bytes, hops, **how) // dtype.itemsize)
