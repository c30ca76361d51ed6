"""Messages from rank to rank of a group, and exchanges made of them."""

from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor


def send(tensor: Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> dist.Work:
    """Start to send; ``peer`` is a rank in the group."""
    work = dist.isend(tensor, group=group, tag=tag, group_dst=peer)
    assert work is not None  # it is only outside the group
    return work


def receive(tensor: Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> dist.Work:
    """Start to receive; ``peer`` is a rank in the group."""
    work = dist.irecv(tensor, group=group, tag=tag, group_src=peer)
    assert work is not None  # it is only outside the group
    return work


def exchange(
    outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], group: dist.ProcessGroup, tag: int
) -> list[dist.Work]:
    """Start messages to and from other ranks, all at once, and copy this rank's own part; for CPU tensors.

    In gloo's own collectives ranks wait for each other in turn. Side by side, the messages keep all links
    busy (docs/log.md). Each rank begins with the next one, so that none is everybody's first.

    Args:
        outgoing: Contiguous tensor for every rank of the group, this one too; empty ones do not go.
        incoming: Contiguous tensor for what comes from every rank, this one too.
        group: The ranks.
        tag: Keeps exchanges apart that run at the same time.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    works = [
        receive(tensor, peer, group, tag)
        for peer, tensor in incoming.items()
        if peer != rank and tensor.numel()
    ]
    order = [(rank + turn) % world_size for turn in range(1, world_size)]
    works += [send(outgoing[peer], peer, group, tag) for peer in order if outgoing[peer].numel()]
    incoming[rank].copy_(outgoing[rank])
    return works


def exchange_in_batch(
    sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]], group: dist.ProcessGroup
) -> None:
    """Messages to and from ranks of the group as one batch, waited for.

    NCCL matches messages by their order between two ranks, and empty ones must not go.

    Args:
        sent: The receiver's rank in the group and what goes there.
        received: The sender's rank and memory for what comes.
        group: The ranks.
    """
    operations = [
        dist.P2POp(call, x, group=group, group_peer=rank)
        for call, messages in ((dist.isend, sent), (dist.irecv, received))
        for rank, x in messages
    ]
    if operations:
        wait_for(dist.batch_isend_irecv(operations))


def wait_for(works: Iterable[dist.Work]) -> None:
    """Wait until all of these have ended; on CUDA the current stream waits instead of the host."""
    for work in works:
        work.wait()
