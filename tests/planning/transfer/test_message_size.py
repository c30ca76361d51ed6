from megatron_fssdp.planning.transfer.message_size import (
    CUDA_MESSAGE_BYTES,
    HOST_MESSAGE_BYTES,
    message_bytes,
)


def test_the_message_size_depends_on_the_memory_of_the_tensors() -> None:
    assert message_bytes(on_cuda=False) == HOST_MESSAGE_BYTES == 128 * 1024
    assert message_bytes(on_cuda=True) == CUDA_MESSAGE_BYTES == 1024 * 1024
