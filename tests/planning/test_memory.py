from dataclasses import astuple, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_fssdp.planning import memory as planned
from megatron_fssdp.planning.memory import ExpertOptimizer, HeldReplicas, expert_memory, memory_capacity
from megatron_fssdp.planning.replica_life import PipelineStage, ReplicaLife
from megatron_fssdp.planning.transfer.message_size import FixedMessages, PipelinedMessages


def held(life=ReplicaLife.ITERATION, num_micro_batches=1, *, layers=(3,), elements=100, **place):
    """Three layers without a pipeline, 100 elements an expert in bf16."""
    return HeldReplicas(life, PipelineStage(layers, **place), elements, 2, num_micro_batches)


# 3 layers, 6 slots (2 experts a layer), with fp32 gradients.
HALF = {
    "held": held(),
    "slots_per_device": 6,
    "replicas": {ReplicaLife.ITERATION: 4},
    "owned_per_layer": 2,
    "gradient_bytes": 4,
    "optimizer": ExpertOptimizer(has_master_weights=True),
    "expert_data_parallel_size": 1,
    "messages": FixedMessages(10**12),
}
SHARED = ExpertOptimizer(has_master_weights=True, is_distributed=True)


def test_bytes_of_owned_experts_equal_those_worked_out_by_hand():
    memory = expert_memory(**HALF)
    assert (memory.slot_parameters_bytes, memory.slot_gradients_bytes) == (6 * 200, 6 * 400)
    assert memory.optimizer_bytes == 6 * 1200  # both moments and the master weights
    assert (memory.transfer_buffers_bytes, memory.expert_parallelism_bytes) == (6800, 10800)
    assert memory.above_expert_parallelism_bytes == 2400 + 1600 + 6800
    assert memory.total_bytes == 21600
    full = expert_memory(**{**HALF, "held": replace(held(), dtype_bytes=4), "optimizer": ExpertOptimizer()})
    assert full.slot_parameters_bytes == full.slot_gradients_bytes == 6 * 400
    assert (full.optimizer_bytes, full.replica_parameters_bytes) == (6 * 800, 3 * 4 * 400)


SEVERAL, PASS, MICRO, STAYS = (
    {"held": held(num_micro_batches=8), "replicas": {life: 4}}
    for life in (ReplicaLife.ITERATION, ReplicaLife.LAYER_PASS, ReplicaLife.MICRO_BATCH, ReplicaLife.RESIDENT)
)


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        # More passes may follow, so one layer's gradients are in fp32. They are rounded to travel.
        ({}, (3 * 4 * 200, 4 * 400, 0, 3 * 6 * 200 + 6 * 400 + 4 * 200)),
        # Of adapters alone, gradients are computed and travel.
        ({"held": replace(held(), trained_share=0.1)}, (2400, 4 * 40, 0, 3 * 6 * 20 + 6 * 40 + 4 * 20)),
        # Sums of all layers travel in fp32.
        (SEVERAL, (2400, 3 * 4 * 400, 0, 3 * 6 * 400)),
        (PASS, (4 * 200, 4 * 200, 0, 3 * 6 * 200 + 6 * 400)),
        # Gradients return to owners with their micro-batch, of which one is in flight.
        (MICRO, (2400, 800, 0, 3 * 6 * 200 + 6 * 400)),
        # Every micro-batch in flight has replicas of its own, but only one is in its backward pass.
        ({**MICRO, "held": held(num_micro_batches=8, num_stages=4)}, (4 * 2400, 800, 0, 3600 + 2400)),
        # Flat copies are fp32 gradients of two layers, of owned experts and of replicas.
        (STAYS, (2400, 3 * 4 * 400, 3 * 4 * 1200, 2 * 6 * 400 + 3 * 6 * 400)),
        ({**STAYS, "optimizer": SHARED, "expert_data_parallel_size": 2}, (2400, 4800, 7200, 4800 + 7200)),
        # Some layers keep 2 replicas, and others have 5 for a pass: transfers of one layer at a time.
        (
            {**SEVERAL, "replicas": {ReplicaLife.ITERATION: 2, ReplicaLife.LAYER_PASS: 5}},
            (1200 + 5 * 200, 3 * 2 * 400 + 5 * 200, 0, max(3 * 4 * 400, 3 * 7 * 200 + 7 * 400)),
        ),
        ({"replicas": {ReplicaLife.ITERATION: 0}}, (0, 0, 0, 0)),
    ],
)
def test_bytes_of_replicas_equal_those_worked_out_by_hand(changed, wanted):
    """Parameters, gradients, optimizer states, and buffers of transfers."""
    memory = expert_memory(**{**HALF, **changed})
    assert astuple(memory)[3:] == wanted


@pytest.mark.parametrize(
    ("optimizer", "ranks", "wanted"),
    [
        (ExpertOptimizer(), 4, 8 * 10),
        (ExpertOptimizer(has_master_weights=True), 4, 12 * 10),
        (ExpertOptimizer(is_distributed=True), 4, 8 * 3),  # 10 elements over 4 ranks: 3 at most
        (SHARED, 5, 12 * 2),
        (ExpertOptimizer(num_state_tensors=0), 1, 0),
        (ExpertOptimizer(num_state_tensors=1, has_master_weights=True), 1, 8 * 10),
    ],
)
def test_optimizer_state_bytes_follow_the_optimizer_and_its_sharding(optimizer, ranks, wanted):
    assert optimizer.state_bytes(10, ranks) == wanted
    assert optimizer.owned_bytes(3 * 10, 10, ranks) == wanted + 3 * 10


def test_the_messages_of_each_child_bound_reduction_buffers():
    def buffers(messages):
        return expert_memory(**{**HALF, **MICRO, "messages": messages}).transfer_buffers_bytes

    # Of six experts, three children send bf16, and each sum is in fp32.
    assert buffers(FixedMessages(50)) == 6 * (3 + 2) * 50
    assert buffers(FixedMessages(50, num_open=2)) == 6 * (3 + 2) * 100
    assert buffers(FixedMessages(1000)) == 6 * (3 + 2) * 200
    # Together they have a bound, but for the alignment of 18 messages.
    assert buffers(PipelinedMessages(10, 10, most_bytes=64)) == (64 + 18 * 16) + 2 * (64 + 6 * 16)


@pytest.fixture(autouse=True)
def without_reserve(monkeypatch):
    monkeypatch.setattr(planned, "RESERVE_FRACTION", 0.0)


def capacity(usable_bytes, of, *, num_experts=8, messages=None):
    layer = {"num_experts": num_experts, "owned_per_layer": 2, "messages": messages}
    return memory_capacity(usable_bytes, of, **layer)[0]


def test_a_fifth_of_the_free_bytes_is_a_reserve(monkeypatch):
    monkeypatch.undo()
    assert [capacity(free, held()) for free in (2 * 1000 * 5 // 4 - 5, 2 * 1000 * 5 // 4)] == [1, 2]


@pytest.mark.parametrize(
    ("usable_bytes", "num_micro_batches", "message_bytes", "wanted"),
    [
        (0, 1, 100, 0),
        # Buffers for three senders of gradients in bf16, 100 of 200 bytes each, and for a sum in fp32.
        (2 * (1000 + 5 * 100), 1, 100, 2),
        (2 * (1000 + 5 * 100) - 1, 1, 100, 1),
        # Several micro-batches send fp32 sums, 400 bytes.
        (1800 + 3 * 400, 2, 400, 1),
        (1800 + 3 * 400 - 1, 2, 400, 0),
    ],
)
def test_capacities_equal_those_worked_out_by_hand(usable_bytes, num_micro_batches, message_bytes, wanted):
    of = held(num_micro_batches=num_micro_batches)
    assert capacity(usable_bytes, of, messages=FixedMessages(message_bytes)) == wanted


@given(
    usable_bytes=st.integers(0, 10**6),
    elements=st.integers(1, 500),
    num_experts=st.integers(1, 20),
    life=st.sampled_from([life for life in ReplicaLife if life is not ReplicaLife.RESIDENT]),
    place=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_memory_capacity_fits_and_one_more_slot_would_not(
    usable_bytes, elements, num_experts, life, place
):
    num_layers, num_stages, num_micro_batches = place
    of = held(life, num_micro_batches, layers=(num_layers,), elements=elements, num_stages=num_stages)
    slots = capacity(usable_bytes, of, num_experts=num_experts)

    def replica_bytes(num_replicas):
        memory = expert_memory(**{**HALF, "held": of, "replicas": {life: num_replicas}})
        return memory.replica_parameters_bytes + memory.replica_gradients_bytes

    assert 0 <= slots <= num_experts
    assert replica_bytes(slots) <= usable_bytes
    assert slots == num_experts or replica_bytes(slots + 1) > usable_bytes


def test_quantized_copies_of_replicas_count_as_long_as_their_weights_or_passes():
    """3 layers of 4 replicas with 100 elements in bf16, each copied twice in fp8 with a scale for 32."""
    of = replace(held(), copy_bytes=2 * (1 + 1 / 32))
    assert expert_memory(**{**HALF, "held": of}).replica_parameters_bytes == 4 * (600 + 618)
    assert replace(of, expert_elements=32).bytes_at_peak((1, 3, 2)) == 6 * (64 + 66)
    usable = 4 * (3 * 200 + 400 + 3 * 206.25)
    assert [capacity(int(usable) - lack, of, num_experts=9) for lack in (0, 5)] == [4, 3]
    # Weights of one layer at a time; the copies are saved in every layer for the backward pass.
    of = replace(of, life=ReplicaLife.LAYER_PASS, num_micro_batches=2)
    in_pass = {**HALF, "held": of, "replicas": {ReplicaLife.LAYER_PASS: 4}}
    assert expert_memory(**in_pass).replica_parameters_bytes == 4 * (200 + 618)
    assert replace(of, expert_elements=32).bytes_at_peak((1, 3, 2)) == 3 * 64 + 6 * 66


@pytest.mark.parametrize(
    ("life", "num_micro_batches", "wanted"),
    [
        (ReplicaLife.ITERATION, 1, 6 * 20),
        (ReplicaLife.ITERATION, 2, 6 * (20 + 40)),
        (ReplicaLife.LAYER_PASS, 2, 3 * 20),
    ],
)
def test_replicas_of_measured_iterations_take_what_they_were_given_room_for(life, num_micro_batches, wanted):
    """Layers with 1, 3 and 2 replicas of 10 elements in 2 bytes, whose sums over micro-batches have 4."""
    assert held(life, num_micro_batches, elements=10).bytes_at_peak((1, 3, 2)) == wanted


@given(
    free_bytes=st.integers(0, 10**6),
    num_layers=st.integers(1, 30),
    num_micro_batches=st.integers(1, 3),
    kept_layers=st.integers(0, 30),
    owned=st.integers(1, 8),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_life_the_layers_have_their_replicas_fit(
    free_bytes, num_layers, num_micro_batches, kept_layers, owned
):
    of = held(num_micro_batches=num_micro_batches, layers=(num_layers,), elements=10)
    layer = {"num_experts": 10**6, "owned_per_layer": owned, "messages": None}
    most, (kept, in_pass, in_micro_batch) = memory_capacity(free_bytes, of, **layer)
    kept_layers = min(kept_layers, num_layers)
    # Weights and sums of layers that keep them, sums of one layer in one micro-batch; one of the others.
    layer_bytes, made = (60, 0) if num_micro_batches > 1 else (20, 40)
    of_kept = kept * (kept_layers * layer_bytes + bool(kept_layers) * made)
    assert of_kept + in_pass * 40 * (kept_layers < num_layers) <= free_bytes
    # One micro-batch is in flight: weights of all layers, and sums of one layer's pass.
    assert num_layers * in_micro_batch * 20 + in_micro_batch * 40 <= free_bytes
    assert in_micro_batch == kept <= most

    def left_beside(number):
        return (free_bytes - number * ((num_layers - 1) * layer_bytes + made)) // 40

    assert in_pass == left_beside(kept)
    assert in_pass >= owned or not kept
    assert kept == most or left_beside(kept + 1) < owned
