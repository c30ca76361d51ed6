import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.transfer.message_size import (
    ALIGNMENT_BYTES,
    CUDA_MESSAGES,
    HOST_MESSAGES,
    NEARLY,
    PipelinedMessages,
    num_batches,
)

MIB = 2**20
SIZES = st.integers(1, 10**10)


@given(SIZES, st.booleans(), st.integers(0, 99))
def test_over_one_hop_messages_end_only_where_buffers_are_full(expert_bytes, is_far, num_received):
    message = CUDA_MESSAGES.message_bytes(expert_bytes, 1, is_far=is_far, num_received=num_received)
    at_once = num_received * (message - ALIGNMENT_BYTES)
    assert at_once <= 48 * MIB
    if num_received * expert_bytes <= 48 * MIB:
        assert message == expert_bytes
    else:
        assert num_batches(expert_bytes, message, 1) <= -(-num_received * expert_bytes // (48 * MIB))


@given(SIZES, st.integers(1, 12), st.floats(1e3, 1e9))
def test_there_are_as_few_messages_as_nearly_take_the_shortest_time(expert_bytes, hops, start_bytes):
    rule = PipelinedMessages(1.0, start_bytes)

    def seconds(number):
        # In units of a start-up, in which start_bytes travel.
        return (number + hops - 1) * (1 + expert_bytes / number / start_bytes)

    message_bytes = rule.message_bytes(expert_bytes, hops, is_far=True)
    assert message_bytes % ALIGNMENT_BYTES == 0 or message_bytes == expert_bytes
    if message_bytes < 4096:  # Rounding to the alignment counts.
        return
    best_s = min(map(seconds, range(1, 1000)))
    number = -(-expert_bytes // message_bytes)
    assert seconds(number) <= (NEARLY + 0.01) * best_s
    assert number == 1 or seconds(number - 1) > (NEARLY - 0.01) * best_s


@pytest.mark.parametrize(
    ("mib", "hops", "is_far", "wanted"),
    [(4, 3, False, 1), (8, 3, False, 1), (16, 3, False, 2), (16, 5, True, 4), (64, 2, True, 3)],
)
def test_numbers_of_messages_between_devices_that_are_not_measured(mib, hops, is_far, wanted):
    message = CUDA_MESSAGES.message_bytes(mib * MIB, hops, is_far=is_far)
    assert num_batches(mib * MIB, message, 1) == wanted


@given(SIZES, st.integers(1, 6), st.booleans(), st.integers(1, 99))
def test_buffers_hold_the_open_messages_of_all_senders(gradient_bytes, num_hops, is_far, num_received):
    how = {"is_far": is_far, "num_received": num_received}
    for rule, num_open in ((HOST_MESSAGES, HOST_MESSAGES.num_open), (CUDA_MESSAGES, 1)):
        message = rule.message_bytes(gradient_bytes, num_hops, **how)
        wanted = num_received * min(gradient_bytes, num_open * message)
        assert rule.buffered_bytes(gradient_bytes, num_received) >= wanted
    most = min(num_received * gradient_bytes, 48 * MIB + num_received * ALIGNMENT_BYTES)
    assert CUDA_MESSAGES.buffered_bytes(gradient_bytes, num_received) == most
