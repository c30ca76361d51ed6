"""Dispatch, compute and combine step by step, group by group (FasterMoE, §4.2, the smart schedule).

Ranks form groups and the groups a ring of n. In step j a rank sends rows to group ``own − j`` and gets
rows from group ``own + j``; it computes on those while later steps' rows travel, and sends the
results back. Messages run on a lane of their own: ``S_0 … S_{n−1}``, then ``R_0 … R_{n−1}``. The own
group, without slow links, comes first and the neighbours in the ring last; or the own group last, where
something else has to arrive before its rows can be computed.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.failure_place import naming_failures
from megatron_fssdp.collectives.messages import exchange_in_batch, receive, send, wait_for
from megatron_fssdp.collectives.transfer_lane import thread_lane
from megatron_fssdp.planning.placement.group_ring import GroupRing

Compute = Callable[[int, Sequence[Tensor]], Sequence[Tensor]]
"""From a step and its rows, in the order of their senders, to tensors with as many rows."""

_TAG = 1 << 17  # apart from exchanges that are not grouped


def exchange_in_steps(
    outgoing: Sequence[Tensor],
    results: Sequence[Tensor],
    send_D: Sequence[int],
    receive_D: Sequence[int],
    compute: Compute,
    ring: GroupRing,
    group: dist.ProcessGroup,
) -> None:
    """Send rows, compute on those of others, and get the own ones' results; every rank has to call it.

    Args:
        outgoing: Tensors whose rows go together, in the order of destinations, ``[sum(send_D), ...]``.
        results: Memory for what comes back for these rows, in the same order.
        send_D: Rows to each rank.
        receive_D: Rows from each rank.
        compute: Called in this thread, for one step after the other.
        ring: The groups.
        group: The ranks.
    """
    steps = _Steps(
        [x.split(list(send_D)) for x in outgoing],
        [x.split(list(send_D)) for x in results],
        receive_D,
        ring,
        group,
    )
    if outgoing[0].device.type == "cuda":
        _run_on_stream(steps, compute)
    else:
        _run_on_lane(steps, compute)


@dataclass(frozen=True, eq=False)
class _Steps:
    """What goes from rank to rank in each step; ``S`` there and ``R`` back."""

    outgoing_D: list[tuple[Tensor, ...]]
    results_D: list[tuple[Tensor, ...]]
    receive_D: Sequence[int]
    ring: GroupRing
    group: dist.ProcessGroup

    def buffers(self, step: int) -> list[Tensor]:
        """Memory for a step's rows."""
        num_rows = sum(self.receive_D[peer] for peer in self.ring.senders(step))
        return [parts[0].new_empty(num_rows, *parts[0].shape[1:]) for parts in self.outgoing_D]

    def parts(self, step: int, tensors: Sequence[Tensor]) -> list[tuple[int, int, Tensor]]:
        """(peer, number of the tensor, rows) of tensors in the order of a step's senders."""
        peers = self.ring.senders(step)
        sizes = [self.receive_D[peer] for peer in peers]
        return [
            (peer, number, part)
            for number, tensor in enumerate(tensors)
            for peer, part in zip(peers, tensor.split(sizes), strict=True)
        ]

    def sent(self, step: int) -> list[tuple[int, int, Tensor]]:
        """The same of this rank's rows and a step's receivers."""
        return _by_peer(self.ring.receivers(step), self.outgoing_D)

    def returned(self, step: int) -> list[tuple[int, int, Tensor]]:
        """The same of the memory for results."""
        return _by_peer(self.ring.receivers(step), self.results_D)


def _by_peer(peers: range, tensors_D: Sequence[Sequence[Tensor]]) -> list[tuple[int, int, Tensor]]:
    return [(peer, number, parts[peer]) for number, parts in enumerate(tensors_D) for peer in peers]


def _run_on_lane(steps: _Steps, compute: Compute) -> None:
    """CPU: a thread drives the messages while this one computes."""
    num_steps = steps.ring.num_steps
    arrived: list[Future[list[Tensor]]] = [Future() for _ in range(num_steps)]
    computed: list[Future[Sequence[Tensor]]] = [Future() for _ in range(num_steps)]

    def drive() -> dict[int, Tensor]:
        try:
            with naming_failures("a grouped exchange"):
                _drive(steps, arrived, computed)
        except BaseException as error:
            for future in arrived:
                if not future.done():
                    future.set_exception(error)
            raise
        return {}

    pending = thread_lane(steps.group).submit(drive)
    try:
        for step in range(num_steps):
            computed[step].set_result(compute(step, arrived[step].result()))
    except BaseException as error:
        for waiting in computed:
            if not waiting.done():
                waiting.set_exception(error)
        raise
    pending.wait()


def _drive(
    steps: _Steps, arrived: list["Future[list[Tensor]]"], computed: list["Future[Sequence[Tensor]]"]
) -> None:
    group, rank, num_steps = steps.group, steps.ring.rank, steps.ring.num_steps
    own_step = steps.ring.own_step
    width = len(steps.outgoing_D)
    buffers = [steps.buffers(step) for step in range(num_steps)]
    incoming = [
        [
            receive(part, peer, group, _TAG + number)
            for peer, number, part in steps.parts(step, buffers[step])
            if peer != rank and part.numel()
        ]
        for step in range(num_steps)
    ]
    returns = [
        receive(part, peer, group, _TAG + width + number)
        for step in range(num_steps)
        for peer, number, part in steps.returned(step)
        if peer != rank and part.numel()
    ]
    sends: list[list[dist.Work]] = []
    for step in range(num_steps + 1):
        if step < num_steps:
            # One step ahead, so that the link does not wait for this rank to notice an end.
            sends.append(
                [
                    send(part, peer, group, _TAG + number)
                    for peer, number, part in steps.sent(step)
                    if peer != rank and part.numel()
                ]
            )
        if step:
            wait_for(incoming[step - 1])
            if step - 1 == own_step:
                _copy_own(rank, steps.sent(own_step), steps.parts(own_step, buffers[own_step]))
            arrived[step - 1].set_result(buffers[step - 1])
            wait_for(sends[step - 1])
    back: list[dist.Work] = []
    for step in range(num_steps):
        parts = steps.parts(step, computed[step].result())
        back += [
            send(part, peer, group, _TAG + width + number)
            for peer, number, part in parts
            if peer != rank and part.numel()
        ]
        if step == own_step:
            _copy_own(rank, parts, steps.returned(step))
    wait_for(returns)
    wait_for(back)


def _copy_own(
    rank: int, sources: list[tuple[int, int, Tensor]], targets: list[tuple[int, int, Tensor]]
) -> None:
    own = {number: part for peer, number, part in sources if peer == rank}
    for peer, number, part in targets:
        if peer == rank:
            part.copy_(own[number])


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _run_on_stream(steps: _Steps, compute: Compute) -> None:
    """CUDA: messages are queued on a stream of their own, compute on the current one."""
    device = steps.outgoing_D[0][0].device
    stream = _streams.setdefault(device, torch.cuda.Stream(device))
    current, num_steps, rank = torch.cuda.current_stream(device), steps.ring.num_steps, steps.ring.rank
    stream.wait_stream(current)
    for rows_D in (*steps.outgoing_D, *steps.results_D):
        for part in rows_D:
            part.record_stream(stream)
    arrivals = []
    for step in range(num_steps):
        buffers = steps.buffers(step)
        with torch.cuda.stream(stream):
            _together(steps.sent(step), steps.parts(step, buffers), steps.group)
            if step == steps.ring.own_step:
                _copy_own(rank, steps.sent(step), steps.parts(step, buffers))
            arrivals.append((buffers, stream.record_event()))
    for step, (buffers, arrival) in enumerate(arrivals):
        current.wait_event(arrival)
        for buffer in buffers:
            buffer.record_stream(stream)
        computed = compute(step, buffers)
        stream.wait_event(current.record_event())
        parts = steps.parts(step, computed)
        with torch.cuda.stream(stream):
            _together(parts, steps.returned(step), steps.group)
            if step == steps.ring.own_step:
                _copy_own(rank, parts, steps.returned(step))
        for tensor in computed:
            tensor.record_stream(stream)
    current.wait_stream(stream)


def _together(
    sent: list[tuple[int, int, Tensor]], received: list[tuple[int, int, Tensor]], group: dist.ProcessGroup
) -> None:
    """A step's messages as one batch."""
    outgoing, incoming = (
        [(peer, part) for peer, _, part in messages if peer != group.rank() and part.numel()]
        for messages in (sent, received)
    )
    exchange_in_batch(outgoing, incoming, group)
