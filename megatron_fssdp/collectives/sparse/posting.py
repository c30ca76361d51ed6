"""Posts the messages of one step of a transfer: gloo's one by one, NCCL's as one batch."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.collectives.messages import receive, send


class Posting(NamedTuple):
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


class Poster(Protocol):
    """Posts messages in the way of one communication library."""

    @property
    def lookahead(self) -> int:
        """Number of steps by which a receive is posted early, and for which a send can stay open."""

    def post(self, messages: Sequence[Posting], group: dist.ProcessGroup) -> list[dist.Work]:
        """Start messages together, and return a work handle for each of them."""


class GlooMessages:
    """Posts every message for itself, receives early.

    Gloo's sender waits for the receiver, so early receives hide a round trip for each message. Gloo has no
    batches, and single messages cost the host less time.
    """

    lookahead = 4

    def post(self, messages: Sequence[Posting], group: dist.ProcessGroup) -> list[dist.Work]:
        """Start the messages one by one."""
        return [
            (receive if message.is_receive else send)(message.tensor, message.peer, group, message.tag)
            for message in messages
        ]


class NcclBatches:
    """Posts the sends and receives of a step as one batch.

    NCCL matches messages by their order between two ranks, so the sends and receives of a step must start
    together.
    """

    lookahead = 0

    def post(self, messages: Sequence[Posting], group: dist.ProcessGroup) -> list[dist.Work]:
        """Start the messages as one batch, for which NCCL has one work handle."""
        if not messages:
            return []
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


def poster_for(device: torch.device) -> Poster:
    """The poster for tensors on a device."""
    return NcclBatches() if device.type == "cuda" else GlooMessages()
