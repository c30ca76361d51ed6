"""Point-to-point messages between the ranks of a group."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

_connected_backends: WeakKeyDictionary[dist.ProcessGroup, object] = WeakKeyDictionary()


def start_exchange(
    sent: Sequence[tuple[int, Tensor]],
    received: Sequence[tuple[int, Tensor]],
    group: dist.ProcessGroup,
    tag: int = 0,
) -> tuple[list[dist.Work], list[dist.Work]]:
    """Start messages as one batch, and copy this rank's own.

    Each message is the other rank in the group and a contiguous tensor to send or to fill. Messages of two
    ranks are matched by their order. Exchanges that run at the same time need different tags. The result is
    the operations to wait for before received tensors are read, then those of sent ones. Each has one for
    every message to another rank; NCCL's are the same for all.
    """
    own = group.rank()
    kept = [[x for rank, x in messages if rank == own] for messages in (sent, received)]
    for x, memory in zip(*kept, strict=True):
        memory.copy_(x)
    receives, sends = (
        [(rank, x) for rank, x in messages if rank != own and x.numel()]  # NCCL refuses empty ones.
        for messages in (received, sent)
    )
    if not any(x.device.type == "cuda" for _, x in (*receives[:1], *sends[:1])):
        # Gloo has no batches, and single messages cost the host less time.
        arriving = [dist.irecv(x, group=group, tag=tag, group_src=rank) for rank, x in receives]
        leaving = [dist.isend(x, group=group, tag=tag, group_dst=rank) for rank, x in sends]
        return cast(list[dist.Work], arriving), cast(list[dist.Work], leaving)
    # NCCL matches sends and receives by their order, so it needs them in one batch.
    operations = [
        dist.P2POp(kind, x, group=group, tag=tag, group_peer=rank)
        for kind, messages in ((dist.irecv, receives), (dist.isend, sends))
        for rank, x in messages
    ]
    works = dist.batch_isend_irecv(operations)
    works = works if len(works) == len(operations) else works[:1] * len(operations)
    return works[: len(receives)], works[len(receives) :]


def exchange(
    sent: Sequence[tuple[int, Tensor]],
    received: Sequence[tuple[int, Tensor]],
    group: dist.ProcessGroup,
    tag: int = 0,
) -> None:
    """:func:`start_exchange`, and wait for all messages."""
    wait_for(chain(*start_exchange(sent, received, group, tag)))


def wait_for(works: Iterable[dist.Work]) -> None:
    """Wait until all of these operations are complete; on CUDA the current stream waits, not the host."""
    for work in dict.fromkeys(works):
        work.wait()


@contextmanager
def naming_failures(place: str) -> Iterator[None]:
    """Note ``place`` in errors, as a lost connection does not show which operation it interrupted."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {place}")
        raise


def connect_pairs(group: dist.ProcessGroup, device: torch.device) -> None:
    """Open the connections between every two ranks of a group.

    NCCL would open them when a plan first moves an expert between two ranks. Every rank of the group must
    make the first call, which also creates the group's communicator; further calls do nothing, unless a host
    has ended the group and made it anew behind the same object, as slime does.
    """
    backend = group._get_backend(device)
    if _connected_backends.get(group) is backend:
        return
    _connected_backends[group] = backend
    rank, num_ranks = group.rank(), group.size()
    # Every rank begins with its next neighbour, so that no rank gets all first messages.
    others = [(rank + turn) % num_ranks for turn in range(1, num_ranks)]
    sent, received = torch.zeros(1, device=device), torch.empty(num_ranks, device=device)
    exchange([(peer, sent) for peer in others], [(peer, received[peer : peer + 1]) for peer in others], group)
    torch.cuda.current_stream(device).synchronize()
