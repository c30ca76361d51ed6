"""The accounted memory equals what a Megatron training allocates for its experts."""

import gc
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from megatron.core import num_microbatches_calculator

from megatron_fssdp.megatron_adapter.iterations.iteration_driver import IterationDriver
from megatron_fssdp.megatron_adapter.iterations.training_reports import _most_micro_batches, account_memory
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
from megatron_fssdp.runtime.slots.replica_slots import ReplicaSlots
from megatron_fssdp.strategies.fastermoe import fastermoe_strategy

from ..held_bytes import num_bytes, state_bytes
from ..training_run import note, rows, slow, train, wrap

FSSDP, EP = "fssdp reshard_interval=2 slots=1 overlap_degree=1", "ep"

# name | ranks | Megatron's arguments | bytes of an element's parameter, main_grad and optimizer state
LAYOUTS = rows(
    """
    bf16_distributed | 4 | --bf16 {DISTRIBUTED} | 2 4 12
    fp32 | 2 | | 4 4 8
    bf16 | 2 | --bf16 | 2 4 12
    bf16_gradients_in_half | 2 | --bf16 --grad-reduce-in-bf16 | 2 2 12
    momentum | 2 | --optimizer sgd | 4 4 4
    bf16_momentum | 2 | --bf16 --optimizer sgd | 2 4 8
    """
)
FIRST, *SLOW = LAYOUTS
SLOTS = 8  # two layers of four experts
EXPERT_ELEMENTS = 2 * 32 * 64 + 64 + 32


@pytest.mark.parametrize("name", [FIRST, *slow(SLOW)])
def test_accounted_bytes_equal_allocated_bytes(name, text_data):
    """After re-shards, sizes hold and each rank's optimizer part is as large as under plain EP."""
    world_size, layout, sizes = int(LAYOUTS[name][0]), *LAYOUTS[name][1:]
    by_strategy = {}
    for strategy in (FSSDP, EP):
        arguments = f"{{EP2}} --train-iters 3 {layout}"
        run = train(world_size, arguments, text_data, strategy=strategy, before=measure_in_training)
        by_strategy[strategy] = run.notes[2::3]  # of the third iteration, by rank
    of_parameter, of_gradient, of_optimizer = (SLOTS * EXPERT_ELEMENTS * int(size) for size in sizes.split())
    shares = world_size // 2 if "distributed" in layout else 1
    for ranks in by_strategy.values():
        for rank in ranks:
            assert rank["allocated"]["parameters"] == rank["accounted"]["parameters"] == of_parameter
            assert rank["allocated"]["gradients"] == rank["accounted"]["gradients"] == of_gradient
            assert rank["accounted"]["optimizer"] == of_optimizer // shares
        # The ranks that share a distributed optimizer have equal parts of all its parameters, and so
        # nearly equal ones of the experts'.
        allocated = [rank["allocated"]["optimizer"] for rank in ranks]
        assert sum(allocated) == sum(rank["accounted"]["optimizer"] for rank in ranks)
        assert shares > 1 or set(allocated) == {of_optimizer}
    moved, plain = by_strategy[FSSDP], by_strategy[EP]
    assert len(moved) == len(plain) == world_size
    assert all(rank["moved"] for rank in moved), "nothing was re-sharded"
    assert not any(rank["moved"] for rank in plain)
    for ours, theirs in zip(moved, plain, strict=True):
        assert ours["allocated"] == theirs["allocated"]
        assert {**ours["accounted"], "replicas": 0} == theirs["accounted"]
        assert ours["accounted"]["replicas"] > 0


PIPELINES = {
    # Megatron's arguments, and for each stage the number of layers whose replicas exist at once.
    "in_turn": ("", (2, 1)),
    "interleaved": ("--num-layers 4 --num-layers-per-virtual-pipeline-stage 1", (5, 3)),
}


@pytest.mark.parametrize("name", ["in_turn", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_each_micro_batch_in_flight_has_its_own_replicas(name, text_data):
    """Count the weights of all replicas after a gather, in a pipeline of two stages of two ranks."""
    more, layers_of_stage = PIPELINES[name]
    arguments = f"{{EP2}} {{PP2}} --train-iters 2 {{BATCH16}} {more}"
    strategy = "fastermoe slots=2 FSSDP_PROFILE_ITERATIONS=1"
    run = train(4, arguments, text_data, strategy=strategy, before=shadow_and_measure)
    by_rank = {rank: (accounted, allocated) for rank, accounted, allocated in run.notes}  # the last ones
    for rank in range(4):
        accounted, allocated = by_rank[rank]
        assert accounted == layers_of_stage[rank // 2] * 2 * EXPERT_ELEMENTS * 4
        # Experts of each group's first rank are shadowed.
        assert allocated == (accounted if rank % 2 else 0)


def test_growing_batches_are_accounted_with_the_largest(monkeypatch):
    args = SimpleNamespace(micro_batch_size=2, data_parallel_size=4, step_batch_size_schedule=None)
    assert _most_micro_batches(args, 3) == 3  # by what a schedule announces, where Megatron counts nothing
    monkeypatch.setattr(num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", args)
    monkeypatch.setattr(num_microbatches_calculator, "get_num_microbatches", lambda: 2)
    assert _most_micro_batches(args, 0) == 2
    args.step_batch_size_schedule = "0:16 1B:64, 2B:32"
    assert _most_micro_batches(args, 0) == 8
    args.step_batch_size_schedule = "0:8"  # of a run that has been resumed on more devices
    assert _most_micro_batches(args, 0) == 2


# ---------------------------------------------------------------- on the ranks


def at_end(do):
    def end_and_do(end, driver):
        do(driver, account_memory(driver._session, driver._host, driver.held))
        return end(driver)

    wrap(IterationDriver, "end", end_and_do)


def shadow_and_measure():
    """Shadow the first experts for any counts, and note the largest number of bytes that replicas had."""
    fastermoe_strategy.select_shadows = lambda *_, most, **__: tuple(range(most))
    allocated = []
    gc.freeze()  # objects that exist already are not searched

    def start_and_measure(start, layer):
        start(layer)  # The gather of this micro-batch's replicas has started now.
        here = [item for item in gc.get_objects() if isinstance(item, ReplicaSlots)]
        flats = [flat for slots in here for flat in slots.weights().values()]
        allocated.append(sum(flat.untyped_storage().nbytes() for flat in flats))

    wrap(SlotLayer, "rows_travel", start_and_measure)
    at_end(lambda _, memory: note((dist.get_rank(), memory.replica_parameters_bytes, max(allocated))))


def measure_in_training():
    moved = []

    def measure(driver, memory):
        if driver.reshard is not None:
            moved.append(driver.reshard.experts_moved)
        parameters = [parameter for slot in driver._session.slots.parameters for parameter in slot]
        accounted = {
            "parameters": memory.slot_parameters_bytes,
            "gradients": memory.slot_gradients_bytes,
            "optimizer": memory.optimizer_bytes,
            "replicas": memory.above_expert_parallelism_bytes,
        }
        allocated = {
            "parameters": num_bytes(parameters),
            "gradients": num_bytes([parameter.main_grad for parameter in parameters]),
            "optimizer": state_bytes(driver._optimizer, parameters),
        }
        note({"moved": sum(moved), "accounted": accounted, "allocated": allocated})

    at_end(measure)
