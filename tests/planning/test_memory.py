"""Bytes of experts, and how many replicas fit: numbers worked out by hand, and relations that always hold."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.memory import (
    ExpertMemory,
    ExpertOptimizer,
    expert_memory,
    held_replicas_bytes,
    memory_capacity,
)
from megatron_fssdp.planning.replica_life import HeldReplicas, PipelineStage, ReplicaLife
from megatron_fssdp.planning.transfer.message_size import CUDA_MESSAGES, FixedMessages, PipelinedMessages


def held(life=ReplicaLife.ITERATION, num_micro_batches=1, *, layers=(3,), **place):
    """Three layers without a pipeline."""
    return HeldReplicas(life, PipelineStage(layers, **place), num_micro_batches)


# 3 layers, 6 slots (2 experts a layer), 100 elements an expert, bf16 with fp32 gradients.
HALF = {
    "held": held(),
    "slots_per_device": 6,
    "replicas_per_layer": 4,
    "owned_per_layer": 2,
    "expert_elements": 100,
    "dtype_bytes": 2,
    "gradient_bytes": 4,
    "optimizer": ExpertOptimizer(has_master_weights=True),
}


def test_half_precision_bytes_equal_those_worked_out_by_hand():
    memory = expert_memory(**HALF)
    assert memory.slot_parameters_bytes == 6 * 200
    assert memory.slot_gradients_bytes == 6 * 400
    assert memory.optimizer_bytes == 6 * 1200  # both moments and the master weights
    assert memory.replica_parameters_bytes == 3 * 4 * 200
    assert memory.replica_gradients_bytes == 4 * 200
    assert memory.packed_experts_bytes == 4 * 200  # gradients of replicas; the two experts were sent earlier
    assert memory.reduction_buffers_bytes == 3 * (2 + 4) * 200 + 2 * 400
    assert memory.transfer_buffers_bytes == 5200
    assert memory.expert_parallelism_bytes == 10800
    assert memory.above_expert_parallelism_bytes == 2400 + 800 + 5200
    assert memory.total_bytes == 19200


def test_resident_replicas_have_gradients_and_optimizer_states():
    resident = {**HALF, "held": held(ReplicaLife.RESIDENT, 4)}
    memory = expert_memory(**resident)
    assert memory.replica_parameters_bytes == 3 * 4 * 200
    assert memory.replica_gradients_bytes == 4 * 200 + 3 * 4 * 400
    assert memory.replica_optimizer_bytes == 3 * 4 * 1200
    # fp32 gradients of two layers, of owned experts and of replicas.
    assert memory.packed_experts_bytes == 2 * (2 + 4) * 400
    assert memory.above_expert_parallelism_bytes == 2400 + 5600 + 14400 + memory.transfer_buffers_bytes
    assert "optimizer 14.1 KiB, transfers" in memory.describe()
    shared = {**resident, "optimizer": ExpertOptimizer(has_master_weights=True, is_distributed=True)}
    assert expert_memory(**shared, expert_data_parallel_size=2).replica_optimizer_bytes == 7200
    assert expert_memory(**HALF).replica_optimizer_bytes == 0


def test_full_precision_bytes_equal_those_worked_out_by_hand():
    memory = expert_memory(**{**HALF, "dtype_bytes": 4, "optimizer": ExpertOptimizer()})
    assert memory.slot_parameters_bytes == memory.slot_gradients_bytes == 6 * 400
    assert memory.optimizer_bytes == 6 * 800
    assert memory.replica_parameters_bytes == 3 * 4 * 400


@pytest.mark.parametrize(
    ("optimizer", "ranks", "wanted"),
    [
        (ExpertOptimizer(), 4, 8 * 10),
        (ExpertOptimizer(has_master_weights=True), 4, 12 * 10),
        (ExpertOptimizer(is_distributed=True), 4, 8 * 3),  # 10 elements over 4 ranks: 3 at most
        (ExpertOptimizer(has_master_weights=True, is_distributed=True), 5, 12 * 2),
        (ExpertOptimizer(num_state_tensors=0), 1, 0),
        (ExpertOptimizer(num_state_tensors=1, has_master_weights=True), 1, 8 * 10),
    ],
)
def test_optimizer_state_bytes_follow_the_optimizer_and_its_sharding(optimizer, ranks, wanted):
    assert optimizer.state_bytes(10, ranks) == wanted


def test_bytes_that_move_with_an_owner_include_optimizer_states():
    """100 elements in bf16 take 200 bytes, and 12 bytes for each element, which two copies can share."""
    half = ExpertOptimizer(has_master_weights=True)
    assert half.owned_bytes(100, 2, 2) == 200 + 1200
    assert ExpertOptimizer(has_master_weights=True, is_distributed=True).owned_bytes(100, 2, 2) == 200 + 600
    assert ExpertOptimizer(num_state_tensors=0).owned_bytes(100, 4, 1) == 400


def test_rematerialization_keeps_replicas_of_one_layer():
    memory = expert_memory(**{**HALF, "held": held(ReplicaLife.LAYER_PASS, 8)})
    assert memory.replica_parameters_bytes == 4 * 200
    assert memory.replica_gradients_bytes == 4 * 200
    # One layer's experts are gathered again while another layer's gradients travel.
    assert memory.packed_experts_bytes == (2 + 4) * 200
    alone = expert_memory(**{**HALF, "held": held(ReplicaLife.LAYER_PASS, 8, layers=(1,))})
    assert alone.packed_experts_bytes == 4 * 200


def test_gradient_sums_over_micro_batches_are_kept_for_all_layers():
    memory = expert_memory(**{**HALF, "held": held(num_micro_batches=2)})
    assert memory.replica_parameters_bytes == 3 * 4 * 200
    assert memory.replica_gradients_bytes == 3 * 4 * 400 + 4 * 200
    assert memory.packed_experts_bytes == 2 * 200  # the sums are sent as they are
    assert memory.reduction_buffers_bytes == 3 * (2 + 4) * 400 + 2 * 400  # they travel in fp32


def test_gradients_added_in_the_matrix_product_are_in_fp32():
    fused = replace(held(), fuses_gradients=True)
    memory = expert_memory(**{**HALF, "held": fused})
    assert memory.replica_gradients_bytes == 4 * 400
    assert replace(memory, replica_gradients_bytes=4 * 200) == expert_memory(**HALF)
    # Several micro-batches have such sums in any case.
    several = replace(fused, num_micro_batches=2)
    assert expert_memory(**{**HALF, "held": several}) == expert_memory(
        **{**HALF, "held": held(num_micro_batches=2)}
    )


def test_replicas_of_one_micro_batch_need_no_gradient_sums():
    """Gradients return to owners with their micro-batch, as in an iteration with a single micro-batch."""
    memory = expert_memory(**{**HALF, "held": held(ReplicaLife.MICRO_BATCH, 8)})
    assert memory == expert_memory(**HALF)
    assert memory.replica_gradients_bytes == 4 * 200


def test_every_micro_batch_in_flight_has_replicas_of_its_own():
    first = held(ReplicaLife.MICRO_BATCH, 8, num_stages=4, stage=0)
    memory = expert_memory(**{**HALF, "held": first})
    assert memory.replica_parameters_bytes == 4 * (3 * 4 * 200)
    last = held(ReplicaLife.MICRO_BATCH, 8, num_stages=4, stage=3)
    assert expert_memory(**{**HALF, "held": last}) == expert_memory(**HALF)
    # Only one micro-batch is in its backward pass.
    assert memory.replica_gradients_bytes == 4 * 200
    assert memory.transfer_buffers_bytes == expert_memory(**HALF).transfer_buffers_bytes
    # Replicas of an iteration are gathered once.
    iteration = held(num_micro_batches=8, num_stages=4)
    assert expert_memory(**{**HALF, "held": iteration}).replica_parameters_bytes == 3 * 4 * 200


def test_the_messages_of_each_child_bound_reduction_buffers():
    def buffers(messages):
        return expert_memory(**HALF, buffered_bytes=messages.buffered_bytes).reduction_buffers_bytes

    assert buffers(FixedMessages(50)) == 3 * 6 * 50 + 2 * 400
    assert buffers(FixedMessages(50, num_open=2)) == 3 * 6 * 100 + 2 * 400
    assert buffers(FixedMessages(1000)) == 3 * 6 * 200 + 2 * 400
    # Two of four messages of 50 bytes, which are aligned to 64 bytes.
    assert buffers(PipelinedMessages(10, fewest=4, most=4)) == 3 * 6 * 128 + 2 * 400


@given(
    st.fixed_dictionaries(
        {
            "life": st.sampled_from(ReplicaLife),
            "num_layers": st.integers(0, 6),
            "num_stages": st.integers(1, 4),
            "slots_per_device": st.integers(0, 40),
            "replicas_per_layer": st.integers(0, 20),
            "owned_per_layer": st.integers(0, 20),
            "expert_elements": st.integers(0, 10**9),
            "dtype_bytes": st.sampled_from([2, 4]),
            "gradient_bytes": st.sampled_from([2, 4]),
            "optimizer": st.builds(ExpertOptimizer, st.integers(0, 3), st.booleans(), st.booleans()),
            "expert_data_parallel_size": st.integers(1, 8),
            "num_micro_batches": st.integers(1, 4),
            "buffered_bytes": st.sampled_from(
                [None, FixedMessages(5).buffered_bytes, CUDA_MESSAGES.buffered_bytes]
            ),
        }
    )
)
def test_only_replicas_take_memory_beyond_expert_parallelism(arguments):
    life, num_layers, num_stages, num_micro_batches = (
        arguments.pop(name) for name in ("life", "num_layers", "num_stages", "num_micro_batches")
    )

    def living(life, num_layers=num_layers):
        return held(life, num_micro_batches, layers=(num_layers,), num_stages=num_stages)

    arguments["held"] = living(life)
    memory = expert_memory(**arguments)
    parts = [getattr(memory, field.name) for field in fields(memory)]
    assert all(isinstance(part, int) and part >= 0 for part in parts)
    assert memory.total_bytes == sum(parts)
    without = expert_memory(**{**arguments, "replicas_per_layer": 0})
    assert without.above_expert_parallelism_bytes == 0
    assert without.total_bytes == memory.expert_parallelism_bytes
    assert without.optimizer_bytes == memory.optimizer_bytes
    released = expert_memory(**{**arguments, "held": living(ReplicaLife.LAYER_PASS)})
    assert released.above_expert_parallelism_bytes <= memory.above_expert_parallelism_bytes
    one_layer = expert_memory(**{**arguments, "held": living(ReplicaLife.ITERATION, min(num_layers, 1))})
    assert released.replica_parameters_bytes == one_layer.replica_parameters_bytes


def test_the_description_lists_all_bytes():
    mebibyte = 2**20
    memory = ExpertMemory(100 * mebibyte, 200 * mebibyte, 900 * mebibyte, 3 * 2**29, 512, 0, 1536, 0)
    assert memory.describe() == (
        "experts 2.7 GiB: parameters 100.0 MiB, gradients 200.0 MiB, optimizer 900.0 MiB, "
        "replicas at most 1.5 GiB (parameters 1.5 GiB, gradients 512 B, optimizer 0 B, transfers 1.5 KiB)"
    )
    assert "experts 2.0 TiB" in ExpertMemory(2 * 2**40, 0, 0, 0, 0, 0, 0, 0).describe()


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
    with pytest.raises(ValueError, match="replicas_per_layer is -1: wanted 0 or more"):
        expert_memory(**{**HALF, "replicas_per_layer": -1})
    with pytest.raises(ValueError, match="num_micro_batches is 0: wanted 1 or more"):
        held(num_micro_batches=0)
    with pytest.raises(ValueError, match="num_state_tensors is -1"):
        ExpertOptimizer(num_state_tensors=-1)
    with pytest.raises(ValueError, match="free_bytes is -1"):
        capacity(-1)
    with pytest.raises(ValueError, match="num_layers is 0: wanted 1 or more"):
        capacity(1, layers=0)
    with pytest.raises(ValueError, match="reserve_fraction is 1"):
        capacity(1, reserve_fraction=1)
