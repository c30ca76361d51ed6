"""Rows that travel to the experts and results that travel back, in steps over a ring of groups of ranks.

This is the exchange of FasterMoE's smart schedule (§4.2). The ranks form n groups, and the groups form a
ring. In step j, a rank sends rows to group ``own - j`` (``Sj``),
computes on the rows that came from group ``own + j`` (``Cj``), and sends the results back (``Rj``)::

    messages    S0 S1    R0 S2    R1 S3    R2       R3
    compute        C0       C1       C2       C3

Step 0 is the exchange within the own group, which uses no slow links. If something else must arrive before
the own group's rows can be computed (``GroupRing.own_last``), every other step comes one earlier and the own
group comes last.

The rows of a step leave just before the compute of the step before. If a device has one connection
(``CUDA_DEVICE_MAX_CONNECTIONS=1``), its kernels wait in the order of their issue, and the first compute
would otherwise wait for nearly all rows. The caller's stream or thread only waits for the rows of the step
that it computes next.

Shape letters: A rows that a rank sends, R rows that a rank receives, D devices.
"""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.messages import start_exchange, wait_for
from megatron_fssdp.planning.placement.topology import GroupRing

Compute = Callable[[int, Sequence[Tensor]], Sequence[Tensor]]
"""From the number of a step and its rows, in the order of senders, to result tensors with as many rows."""

_ROWS_TAG, _RESULTS_TAG = 1 << 17, (1 << 17) + 1  # Other exchanges over the same group use small tags.


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

    Every rank of the group must call it, with the same ring and the same numbers of tensors. The host does
    not wait for a CUDA device.

    Args:
        outgoing: Contiguous tensors whose rows travel together, ``[A, ...]`` each, by destination.
        results: Contiguous tensors to fill with the results of these rows, ``[A, ...]`` each, in this order.
        send_D: Number of rows that this rank sends to each rank, ``[D]``.
        receive_D: Number of rows that it receives from each rank, ``[D]``.
        compute: Function that computes the results of a step's rows, called once in each step.
        ring: Groups of ranks and the order in which this rank exchanges with them.
        group: Process group of all ranks of the ring. NCCL needs a group that has run a collective before,
            because a rank without messages takes no part in a step.
    """
    sent_D, returned_D = (
        list(zip(*(tensor.split(list(send_D)) for tensor in tensors), strict=True))
        for tensors in (outgoing, results)
    )

    def to_receivers(step: int, parts_D: Sequence[Sequence[Tensor]]) -> list[tuple[int, Tensor]]:
        return [(peer, part) for peer in ring.receivers(step) for part in parts_D[peer]]

    def to_senders(step: int, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        peers = ring.senders(step)
        sizes = [receive_D[peer] for peer in peers]
        parts = zip(peers, *(tensor.split(sizes) for tensor in tensors), strict=True)
        return [(peer, part) for peer, *of_peer in parts for part in of_peer]

    def send_rows(step: int) -> tuple[list[Tensor], list[dist.Work], list[dist.Work]]:
        num_rows = sum(receive_D[peer] for peer in ring.senders(step))
        buffers = [tensor.new_empty(num_rows, *tensor.shape[1:]) for tensor in outgoing]
        arrive, leave = start_exchange(
            to_receivers(step, sent_D), to_senders(step, buffers), group, _ROWS_TAG
        )
        return buffers, arrive, leave

    under_way: list[dist.Work] = []
    kept: list[Sequence[Tensor]] = []  # Messages read this memory until the end.
    coming = send_rows(0)
    for step in range(ring.num_steps):
        buffers, arrive, leave = coming
        if step + 1 < ring.num_steps:
            coming = send_rows(step + 1)
        wait_for(arrive)
        computed = compute(step, buffers)
        kept.append(computed)
        back = start_exchange(to_senders(step, computed), to_receivers(step, returned_D), group, _RESULTS_TAG)
        under_way += [*leave, *back[0], *back[1]]
    wait_for(under_way)
