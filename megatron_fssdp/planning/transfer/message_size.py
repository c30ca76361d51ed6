"""How large the messages are in which an expert travels."""

CUDA_MESSAGE_BYTES = 1 << 20
"""Large enough that a message's fixed cost does not count; also the most on any device."""
HOST_MESSAGE_BYTES = 1 << 17
"""Between CPUs: small, so that node leaders forward the first one early, but not so small that
the host's work for each message is what takes the time. Of 32, 64, 128 and 256 KiB this was the best
for experts of 2 to 16 MiB on links of 400 Mbit/s (docs/log.md)."""


def message_bytes(*, on_cuda: bool) -> int:
    """Bytes of a transfer's messages.

    Args:
        on_cuda: Whether the tensors lie on CUDA devices.
    """
    return CUDA_MESSAGE_BYTES if on_cuda else HOST_MESSAGE_BYTES
