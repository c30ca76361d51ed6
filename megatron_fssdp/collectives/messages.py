"""Point-to-point messages between the ranks of a group."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

_connected_groups: WeakSet[dist.ProcessGroup] = WeakSet()


class Posting(NamedTuple):
    """A message to post: a contiguous tensor to send to a peer, by its rank in the group, or to fill from it.

    NCCL ignores the tag, and matches messages by their order between two ranks.
    """

    is_receive: bool
    tensor: Tensor
    peer: int
    tag: int


def post(messages: Sequence[Posting], group: dist.ProcessGroup, *, in_batch: bool) -> list[dist.Work]:
    """Start messages together, and return a work handle for each of them."""
    # NCCL needs the sends and receives of a step in one batch, because it matches them by their order. Gloo
    # has no batches, and single messages cost the host less time.
    if not in_batch:
        started = [
            dist.irecv(tensor, group=group, tag=tag, group_src=peer)
            if is_receive
            else dist.isend(tensor, group=group, tag=tag, group_dst=peer)
            for is_receive, tensor, peer, tag in messages
        ]
        return [work for work in started if work is not None]  # None is for ranks outside the group.
    works = _batch(messages, group)
    return works if len(works) == len(messages) else works[:1] * len(messages)


def start_exchange(
    sent: Sequence[tuple[int, Tensor]],
    received: Sequence[tuple[int, Tensor]],
    group: dist.ProcessGroup,
    tag: int = 0,
) -> tuple[list[dist.Work], list[dist.Work]]:
    """Start messages as one batch, and copy this rank's own.

    Each message is the other rank in the group and a contiguous tensor to send or to fill. Messages of two
    ranks are matched by their order. Exchanges that run at the same time need different tags. The result is
    the operations to wait for before received tensors are read, then the rest; NCCL has one for the batch.
    """
    own = group.rank()
    kept = [[x for rank, x in messages if rank == own] for messages in (sent, received)]
    for x, memory in zip(*kept, strict=True):
        memory.copy_(x)
    messages = [
        Posting(is_receive, x, rank, tag)
        for is_receive, some in ((True, received), (False, sent))
        for rank, x in some
        if rank != own and x.numel()  # NCCL refuses empty ones.
    ]
    works = _batch(messages, group)
    num_received = sum(message.is_receive for message in messages)
    return works[:num_received], works[num_received:]


def exchange(
    sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]], group: dist.ProcessGroup
) -> None:
    """:func:`start_exchange`, and wait for all messages."""
    for works in start_exchange(sent, received, group):
        wait_for(works)


def wait_for(works: Iterable[dist.Work]) -> None:
    """Wait until all of these operations are complete; on CUDA the current stream waits, not the host."""
    for work in works:
        work.wait()


def connect_pairs(group: dist.ProcessGroup, device: torch.device) -> None:
    """Open the connections between every two ranks of a group.

    NCCL would open them when a plan first moves an expert between two ranks. Every rank of the group must
    make the first call, which also creates the group's communicator; further calls do nothing.
    """
    if group in _connected_groups:
        return
    _connected_groups.add(group)
    rank, num_ranks = group.rank(), group.size()
    # Every rank begins with its next neighbour, so that no rank gets all first messages.
    others = [(rank + turn) % num_ranks for turn in range(1, num_ranks)]
    sent, received = torch.zeros(1, device=device), torch.empty(num_ranks, device=device)
    exchange([(peer, sent) for peer in others], [(peer, received[peer : peer + 1]) for peer in others], group)
    torch.cuda.current_stream(device).synchronize()


def _batch(messages: Sequence[Posting], group: dist.ProcessGroup) -> list[dist.Work]:
    operations = [
        dist.P2POp(dist.irecv if is_receive else dist.isend, tensor, group=group, tag=tag, group_peer=peer)
        for is_receive, tensor, peer, tag in messages
    ]
    return dist.batch_isend_irecv(operations) if operations else []
