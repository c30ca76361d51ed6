"""Dispatch, compute and combine step by step, group by group (FasterMoE, §4.2, the smart schedule).

The ranks form n groups, and the groups form a ring. In each step, a rank sends rows to one group (``S``),
receives rows from another group and computes on them (``C``). Afterwards it sends the results back (``R``).
The rows of later steps travel while a rank computes the rows of earlier ones::

    lane of messages (CPU)     S0  S1  S2  S3  R0  R1  R2  R3
    lane of messages (CUDA)    S0  S1  R0  S2  R1  S3  R2  R3
    compute                        C0  C1  C2  C3

In step j, a rank sends rows to group ``own − j`` and receives rows from group ``own + j``. Step 0 is
therefore the exchange within the own group, which uses no slow links. If something else must arrive before
the own group's rows can be computed (``GroupRing.own_last``), every other step comes one earlier and the own
group comes last. For a rank of group 1 in a ring of 4 groups::

                             step 0   step 1   step 2   step 3
    own first    sends to      1        0        3        2
                 computes      1        2        3        0
    own last     sends to      0        3        2        1
                 computes      2        3        0        1
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.failure_place import naming_failures
from megatron_fssdp.collectives.lane_streams import lane_stream
from megatron_fssdp.collectives.messages import exchange_in_batch, receive, send, wait_for
from megatron_fssdp.collectives.transfer_lane import thread_lane
from megatron_fssdp.planning.placement.group_ring import GroupRing

Compute = Callable[[int, Sequence[Tensor]], Sequence[Tensor]]
"""From the number of a step and its rows, in the order of senders, to result tensors with as many rows."""

_TAG = 1 << 17  # Differs from the tags of exchanges that are not grouped.


def exchange_in_steps(
    outgoing: Sequence[Tensor],
    results: Sequence[Tensor],
    send_D: Sequence[int],
    receive_D: Sequence[int],
    compute: Compute,
    ring: GroupRing,
    group: dist.ProcessGroup,
) -> None:
    """Send this rank's rows, compute on received rows, and receive the results of this rank's rows.

    Every rank of the group must call it.

    Args:
        outgoing: Tensors whose rows travel together, ``[sum(send_D), ...]`` each, in the order of
            destinations.
        results: Tensors to fill with the results of these rows, ``[sum(send_D), ...]`` each, in the same
            order.
        send_D: Number of rows that this rank sends to each rank, ``[D]``.
        receive_D: Number of rows that this rank receives from each rank, ``[D]``.
        compute: Function that computes the results of a step's rows. This thread calls it once for each step,
            in the order of the steps.
        ring: Groups of ranks and the order in which this rank exchanges with them.
        group: Process group of all ranks of the ring.
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
    """The messages of each step: rows to the computing ranks (``S``) and results back (``R``).

    A message is (peer, number of the tensor, rows of the tensor). The number distinguishes tensors that
    travel together.

    Attributes:
        outgoing_D: For each outgoing tensor, its rows for each rank.
        results_D: For each result tensor, the memory for the results from each rank.
        receive_D: Number of rows that this rank receives from each rank, ``[D]``.
        ring: Groups of ranks and the order in which this rank exchanges with them.
        group: Process group of all ranks of the ring.
    """

    outgoing_D: list[tuple[Tensor, ...]]
    results_D: list[tuple[Tensor, ...]]
    receive_D: Sequence[int]
    ring: GroupRing
    group: dist.ProcessGroup

    def buffers(self, step: int) -> list[Tensor]:
        """New memory for the rows that this rank receives in a step, one tensor for each outgoing tensor."""
        num_rows = sum(self.receive_D[peer] for peer in self.ring.senders(step))
        return [parts[0].new_empty(num_rows, *parts[0].shape[1:]) for parts in self.outgoing_D]

    def parts(self, step: int, tensors: Sequence[Tensor]) -> list[tuple[int, int, Tensor]]:
        """Messages from or back to a step's senders; the rows of ``tensors`` are in the order of senders."""
        peers = self.ring.senders(step)
        sizes = [self.receive_D[peer] for peer in peers]
        return [
            (peer, number, part)
            for number, tensor in enumerate(tensors)
            for peer, part in zip(peers, tensor.split(sizes), strict=True)
        ]

    def sent(self, step: int) -> list[tuple[int, int, Tensor]]:
        """Messages with this rank's rows to a step's receivers."""
        return _by_peer(self.ring.receivers(step), self.outgoing_D)

    def returned(self, step: int) -> list[tuple[int, int, Tensor]]:
        """Messages with results that come back from a step's receivers."""
        return _by_peer(self.ring.receivers(step), self.results_D)


def _by_peer(peers: range, tensors_D: Sequence[Sequence[Tensor]]) -> list[tuple[int, int, Tensor]]:
    return [(peer, number, parts[peer]) for number, parts in enumerate(tensors_D) for peer in peers]


Arrival = tuple[list[Tensor], list[dist.Work]]
"""The memory of a step's rows, and the messages for which the thread that computes must still wait."""


def _run_on_lane(steps: _Steps, compute: Compute) -> None:
    """Run all steps on CPU tensors: another thread drives the messages while this thread computes.

    This thread waits for the messages of the last step and copies the rank's own rows. The other thread can
    therefore return results as soon as all of this rank's rows have left.
    """
    rank, num_steps, own_step = steps.ring.rank, steps.ring.num_steps, steps.ring.own_step
    arrived: list[Future[Arrival]] = [Future() for _ in range(num_steps)]
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
            buffers, messages = arrived[step].result()
            with naming_failures("a grouped exchange"):
                wait_for(messages)
            if step == own_step:
                _copy_own(rank, steps.sent(step), steps.parts(step, buffers))
            computed[step].set_result(compute(step, buffers))
    except BaseException as error:
        for waiting in computed:
            if not waiting.done():
                waiting.set_exception(error)
        raise
    pending.wait()


def _drive(
    steps: _Steps, arrived: list["Future[Arrival]"], computed: list["Future[Sequence[Tensor]]"]
) -> None:
    group, rank, num_steps = steps.group, steps.ring.rank, steps.ring.num_steps
    own_step, last = steps.ring.own_step, num_steps - 1
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
    for step in range(num_steps):
        # Post one step ahead, so that the link is not idle until this rank notices the end of a step.
        sends.append(
            [
                send(part, peer, group, _TAG + number)
                for peer, number, part in steps.sent(step)
                if peer != rank and part.numel()
            ]
        )
        if step:
            # Waiting for the rows of a step before more are posted keeps the ranks in step.
            wait_for(incoming[step - 1])
            arrived[step - 1].set_result((buffers[step - 1], []))
            wait_for(sends[step - 1])
    arrived[last].set_result((buffers[last], incoming[last]))
    wait_for(sends[last])
    back: list[dist.Work] = []
    for step in range(num_steps):
        parts = steps.parts(step, computed[step].result())
        back += [
            send(part, peer, group, _TAG + width + number)
            for peer, number, part in parts
            if peer != rank and part.numel()
        ]
    _copy_own(rank, steps.parts(own_step, computed[own_step].result()), steps.returned(own_step))
    wait_for(returns)
    wait_for(back)


def _copy_own(
    rank: int, sources: list[tuple[int, int, Tensor]], targets: list[tuple[int, int, Tensor]]
) -> None:
    own = {number: part for peer, number, part in sources if peer == rank}
    for peer, number, part in targets:
        if peer == rank:
            part.copy_(own[number])


def _run_on_stream(steps: _Steps, compute: Compute) -> None:
    """Run all steps on CUDA tensors: messages use a separate stream, and compute uses the current one.

    The rows of step j + 1 are sent just before the compute of step j, and not all before the first compute.
    If the device has one connection (``CUDA_DEVICE_MAX_CONNECTIONS=1``), kernels wait in the order of their
    issue, so the first compute would wait until nearly all rows have arrived. With more connections, the
    order is as good, because one step's rows travel while another step computes.
    """
    device = steps.outgoing_D[0][0].device
    stream = lane_stream("grouped exchange", steps.group, device)
    current, num_steps, rank = torch.cuda.current_stream(device), steps.ring.num_steps, steps.ring.rank
    # This function's caller and the list below refer to all tensors but ``computed`` until the current stream
    # has waited for the messages at the end. Their memory therefore needs no ``record_stream``.
    arrivals: list[tuple[list[Tensor], torch.cuda.Event]] = []

    def send_rows(step: int) -> None:
        buffers = steps.buffers(step)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            _together(steps.sent(step), steps.parts(step, buffers), steps.group)
            if step == steps.ring.own_step:
                _copy_own(rank, steps.sent(step), steps.parts(step, buffers))
            arrivals.append((buffers, stream.record_event()))

    send_rows(0)
    for step in range(num_steps):
        if step + 1 < num_steps:
            send_rows(step + 1)
        buffers, arrival = arrivals[step]
        current.wait_event(arrival)
        computed = compute(step, buffers)
        stream.wait_stream(current)
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
    """Exchange a step's messages with other ranks as one batch."""
    outgoing, incoming = (
        [(peer, part) for peer, _, part in messages if peer != group.rank() and part.numel()]
        for messages in (sent, received)
    )
    exchange_in_batch(outgoing, incoming, group)
