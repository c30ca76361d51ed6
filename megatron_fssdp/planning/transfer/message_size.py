"""Size of the messages in which transfers send an expert."""

CUDA_MESSAGE_BYTES = 1 << 20
"""Between CUDA devices: large enough that the fixed cost of a message does not matter.

It is also the largest message size on any device.
"""
HOST_MESSAGE_BYTES = 1 << 17
"""Between CPUs: small enough that node leaders forward the first message early.

It is also large enough that the host's work for each message does not take most of the time. Of 32, 64, 128
and 256 KiB this was the best size for experts of 2 to 16 MiB on links of 400 Mbit/s (docs/log.md).
"""


def message_bytes(*, on_cuda: bool) -> int:
    """Size of a transfer's messages in bytes.

    Args:
        on_cuda: Whether the tensors are on CUDA devices.
    """
    return CUDA_MESSAGE_BYTES if on_cuda else HOST_MESSAGE_BYTES
