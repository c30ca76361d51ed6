"""How large the messages are in which an expert travels."""

CUDA_MESSAGE_BYTES = 1 << 20
"""Large enough that a message's fixed cost does not count; also the most on any device."""
HOST_MESSAGES_PER_EXPERT = 8
LEAST_HOST_MESSAGE_BYTES, MOST_HOST_MESSAGE_BYTES = 1 << 17, 1 << 18


def message_bytes(expert_bytes: int, *, on_cuda: bool) -> int:
    """Bytes of a transfer's messages, small enough that node leaders forward the first one early.

    Between CPUs, links are slow against a message's fixed cost: in one message an expert takes a link's
    time once for each hop of its chain, in eight it takes little more than once.

    Args:
        expert_bytes: Of one expert.
        on_cuda: Whether the tensors lie on CUDA devices.
    """
    if on_cuda:
        return CUDA_MESSAGE_BYTES
    share = expert_bytes // HOST_MESSAGES_PER_EXPERT
    return max(LEAST_HOST_MESSAGE_BYTES, min(share, MOST_HOST_MESSAGE_BYTES))
