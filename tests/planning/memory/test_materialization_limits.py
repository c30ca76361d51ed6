"""The memory capacity is the largest number of replicas that fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.memory.held_replicas import HeldReplicas, ReplicaLife
from megatron_fssdp.planning.memory.materialization_limits import held_replicas_bytes, memory_capacity
from megatron_fssdp.planning.memory.memory_accounting import ExpertOptimizer, expert_memory
from megatron_fssdp.planning.memory.pipeline_stage import PipelineStage


def capacity(
    free_bytes, life=ReplicaLife.ITERATION, num_micro_batches=1, *, layers=3, num_stages=1, **changed
):
    arguments = {
        "expert_bytes": 200,
        "gradient_bytes_per_expert": 400,
        "num_experts": 8,
        "held": HeldReplicas(life, PipelineStage((layers,), num_stages), num_micro_batches),
        "reserve_fraction": 0.0,
    }
    return memory_capacity(free_bytes, **{**arguments, **changed})


def test_slots_of_an_iteration_and_a_layer_pass_equal_those_worked_out_by_hand():
    # Three layers' parameters and one layer's gradients: 800 bytes a slot.
    assert capacity(799) == 0
    assert capacity(1600) == 2
    assert capacity(1600, reserve_fraction=0.1) == 1
    # One layer's parameters and gradients: 400 bytes a slot.
    assert capacity(1600, ReplicaLife.LAYER_PASS) == 4
    assert capacity(1600, ReplicaLife.LAYER_PASS, 2) == 4
    # In addition three layers' fp32 sums: 2000 bytes a slot.
    assert capacity(1999, num_micro_batches=2) == 0
    assert capacity(2000, num_micro_batches=2) == 1
    assert capacity(10**9) == 8
    assert capacity(0) == 0


def test_each_replica_needs_buffers_for_the_messages_of_three_senders():
    # 800 bytes as above. A single micro-batch sends gradients in the data type of the parameters, 200 bytes.
    assert capacity(2 * (800 + 3 * 100), buffered_bytes=lambda sent: sent // 2) == 2
    assert capacity(2 * (800 + 3 * 100) - 1, buffered_bytes=lambda sent: sent // 2) == 1
    # Several micro-batches send fp32 sums, 400 bytes.
    assert capacity(2000 + 3 * 400, num_micro_batches=2, buffered_bytes=lambda sent: sent) == 1
    assert capacity(2000 + 3 * 400 - 1, num_micro_batches=2, buffered_bytes=lambda sent: sent) == 0


def test_slots_of_a_micro_batch_equal_those_worked_out_by_hand():
    # There are no sums, as in an iteration of a single micro-batch.
    assert capacity(1600, ReplicaLife.MICRO_BATCH, 8) == 2
    # Two micro-batches in flight: twice the parameters, 1400 bytes a slot.
    assert capacity(2799, ReplicaLife.MICRO_BATCH, 8, num_stages=2) == 1
    assert capacity(2800, ReplicaLife.MICRO_BATCH, 8, num_stages=2) == 2
    assert capacity(1600, ReplicaLife.MICRO_BATCH, 1, num_stages=2) == 2


@given(
    st.integers(0, 10**6),
    st.integers(1, 500),
    st.integers(1, 5),
    st.integers(1, 20),
    st.sampled_from([life for life in ReplicaLife if life is not ReplicaLife.RESIDENT]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.floats(0, 0.9),
)
def test_the_memory_capacity_fits_and_one_more_slot_would_not(
    free_bytes,
    expert_elements,
    num_layers,
    num_experts,
    life,
    num_stages,
    num_micro_batches,
    reserve_fraction,
):
    held = HeldReplicas(life, PipelineStage((num_layers,), num_stages), num_micro_batches)
    slots = memory_capacity(
        free_bytes,
        expert_bytes=2 * expert_elements,
        gradient_bytes_per_expert=4 * expert_elements,
        num_experts=num_experts,
        reserve_fraction=reserve_fraction,
        held=held,
    )

    def replica_bytes(num_replicas):
        memory = expert_memory(
            held=held,
            slots_per_device=0,
            replicas_per_layer=num_replicas,
            owned_per_layer=0,
            expert_elements=expert_elements,
            dtype_bytes=2,
            gradient_bytes=4,
            optimizer=ExpertOptimizer(),
        )
        return memory.replica_parameters_bytes + memory.replica_gradients_bytes

    assert 0 <= slots <= num_experts
    usable_bytes = free_bytes * (1 - reserve_fraction)
    assert replica_bytes(slots) <= usable_bytes + 1
    assert slots == num_experts or replica_bytes(slots + 1) > usable_bytes - 1


def test_replicas_of_measured_iterations_take_what_they_were_given_room_for():
    """Layers with 1, 3 and 2 replicas of 10 bytes, whose sums over micro-batches have 40."""
    for life, num_micro_batches, wanted in (
        (ReplicaLife.ITERATION, 1, 6 * 10),
        (ReplicaLife.ITERATION, 2, 6 * (10 + 40)),
        (ReplicaLife.LAYER_PASS, 2, 3 * 10),
    ):
        held = HeldReplicas(life, PipelineStage((3,), 1), num_micro_batches)
        found = held_replicas_bytes((1, 3, 2), expert_bytes=10, gradient_bytes_per_expert=40, held=held)
        assert found == wanted


def test_bad_arguments_say_what_was_wanted():
    with pytest.raises(ValueError, match="free_bytes is -1"):
        capacity(-1)
    with pytest.raises(ValueError, match="num_layers is 0: wanted 1 or more"):
        capacity(1, layers=0)
    with pytest.raises(ValueError, match="reserve_fraction is 1"):
        capacity(1, reserve_fraction=1)
