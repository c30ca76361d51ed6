"""The order in which one device sends and receives the chunks of a transfer plan.

The module is pure data: it says which message belongs to which step. In step ``t``, an edge of depth ``k``
carries chunk ``t - k`` of its expert. A device therefore passes a chunk on in the step after its arrival, and
all levels of a tree work at the same time. For three chunks and the tree 0 → 4 → {5, 6}::

    step                       0        1        2        3
    edge 0 → 4   (depth 0)     chunk 0  chunk 1  chunk 2
    edge 4 → 5   (depth 1)              chunk 0  chunk 1  chunk 2
    edge 4 → 6   (depth 1)              chunk 0  chunk 1  chunk 2

The reduction is the mirror image: the edges carry chunks in the opposite direction, and in a plan of depth
``K`` an edge of depth ``k`` carries chunk ``t - (K - k)``.
"""

from typing import NamedTuple

from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan


class Message(NamedTuple):
    """One chunk of one expert that a device sends to or receives from a peer.

    Attributes:
        peer: Rank of the other device in the group.
        expert: Number of the expert.
        chunk: Number of the chunk within the expert.
    """

    peer: int
    expert: int
    chunk: int


class Step(NamedTuple):
    """Messages that a device posts together; any two devices list their common messages in the same order.

    Attributes:
        sends: Messages that the device sends.
        receives: Messages that the device receives.
    """

    sends: list[Message]
    receives: list[Message]


def num_steps(plan: TransferPlan, num_chunks: int) -> int:
    """Number of steps of a transfer, equal on all devices; some can be empty on a device."""
    return num_chunks + plan.max_depth if num_chunks else 0


def steps_of(plan: TransferPlan, device: int, num_chunks: int, *, is_gather: bool) -> list[Step]:
    """The steps of a device in SparseAllGather, or in SparseReduceScatter.

    Args:
        plan: Edges along which each expert travels.
        device: Number of the device.
        num_chunks: Number of chunks of an expert.
        is_gather: Whether experts travel to their replicas, instead of gradients to the owners.
    """
    steps = [Step([], []) for _ in range(num_steps(plan, num_chunks))]
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
