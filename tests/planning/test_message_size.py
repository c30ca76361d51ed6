import pytest

from megatron_fssdp.planning.message_size import CUDA_MESSAGE_BYTES, message_bytes

KIB = 1 << 10


@pytest.mark.parametrize(
    ("expert_kib", "wanted_kib"), [(1, 128), (1024, 128), (1536, 192), (2048, 256), (16384, 256)]
)
def test_hosts_send_an_expert_in_eight_messages_within_bounds(expert_kib: int, wanted_kib: int) -> None:
    assert message_bytes(expert_kib * KIB, on_cuda=False) == wanted_kib * KIB


def test_cuda_devices_send_large_ones() -> None:
    assert message_bytes(1024 * KIB, on_cuda=True) == CUDA_MESSAGE_BYTES == 1024 * KIB
