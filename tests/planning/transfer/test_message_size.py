from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.transfer.message_size import (
    ALIGNMENT_BYTES,
    CUDA_MESSAGES,
    HOST_MESSAGES,
    PipelinedMessages,
    num_batches,
    num_stages,
)

MIB = 2**20


@given(st.integers(1, 10**10))
def test_over_one_hop_the_whole_expert_is_one_message(expert_bytes: int) -> None:
    message = CUDA_MESSAGES.message_bytes(expert_bytes, num_stages(1, adds=False))
    assert message == expert_bytes
    assert num_batches(expert_bytes, message, 1) == 1


@given(st.integers(1, 10**10), st.integers(2, 12))
def test_pipelined_stages_have_8_to_16_messages_but_no_small_ones(expert_bytes: int, stages: int) -> None:
    message = CUDA_MESSAGES.message_bytes(expert_bytes, stages)
    number = -(-expert_bytes // message)
    assert 1 <= number <= 16
    assert number == 1 or (message >= MIB and message % ALIGNMENT_BYTES == 0)
    if expert_bytes >= 8 * MIB:
        assert number >= 8
    assert num_batches(expert_bytes, message, stages) <= 16 + stages - 1


@given(st.integers(8 * MIB, 10**9), st.integers(2, 6))
def test_the_number_of_messages_makes_the_pipeline_shortest(expert_bytes: int, stages: int) -> None:
    rule = PipelinedMessages(MIB, fewest=1, most=10**6)

    def seconds(number: int) -> float:
        # In units of a batch's fixed cost, in which MIB bytes travel.
        return (number + stages - 1) * (1 + expert_bytes / number / MIB)

    number = -(-expert_bytes // rule.message_bytes(expert_bytes, stages))
    best = min(range(1, 200), key=seconds)
    assert seconds(number) <= 1.15 * seconds(best)


@given(st.integers(1, 10**10), st.integers(1, 6))
def test_the_buffers_of_a_sender_hold_its_open_messages(gradient_bytes: int, num_hops: int) -> None:
    for rule in (HOST_MESSAGES, CUDA_MESSAGES):
        message = rule.message_bytes(gradient_bytes, num_stages(num_hops, adds=True))
        wanted = min(gradient_bytes, rule.num_open * message)
        assert wanted <= rule.buffered_bytes(gradient_bytes) <= gradient_bytes
