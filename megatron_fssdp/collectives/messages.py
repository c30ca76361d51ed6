"""Point-to-point messages between the ranks of a group, and exchanges that consist of such messages."""

from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor


def send(tensor: Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> dist.Work:
    """Start to send a tensor and return its work handle; ``peer`` is the receiver's rank in the group."""
    work = dist.isend(tensor, group=group, tag=tag, group_dst=peer)
    assert work is not None  # It is None only on ranks outside the group.
    return work


def receive(tensor: Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> dist.Work:
    """Start to receive a tensor and return its work handle; ``peer`` is the sender's rank in the group."""
    work = dist.irecv(tensor, group=group, tag=tag, group_src=peer)
    assert work is not None  # It is None only on ranks outside the group.
    return work


def exchange(
    outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], group: dist.ProcessGroup, tag: int
) -> list[dist.Work]:
    """Start all messages of an all-to-all exchange of CPU tensors, and copy this rank's own part.

    In gloo's own collectives, ranks wait for each other in turn. Messages that are all posted at once keep
    all links busy (docs/log-2026-11-21.md). Each rank sends to the next rank first, so that the ranks do not
    all send to the same rank first.

    Args:
        outgoing: For every rank of the group, this one included, the contiguous tensor to send to it. Empty
            tensors are not sent.
        incoming: For every rank of the group, this one included, the contiguous tensor to receive into.
        group: Process group of the ranks that exchange.
        tag: Message tag; exchanges that run at the same time need different tags.

    Returns:
        Work handles of all messages, to be waited for by the caller.
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
    """Send and receive messages as one batch, and wait for all of them.

    NCCL matches messages by their order between two ranks. It does not allow empty messages, so the caller
    leaves them out.

    Args:
        sent: Messages to send: the receiver's rank in the group and the tensor.
        received: Messages to receive: the sender's rank in the group and the tensor to fill.
        group: Process group of the ranks that exchange.
    """
    operations = [
        dist.P2POp(call, x, group=group, group_peer=rank)
        for call, messages in ((dist.isend, sent), (dist.irecv, received))
        for rank, x in messages
    ]
    if operations:
        wait_for(dist.batch_isend_irecv(operations))


def wait_for(works: Iterable[dist.Work]) -> None:
    """Wait until all of these operations are complete; on CUDA the current stream waits, not the host."""
    for work in works:
        work.wait()
