"""The accounted memory equals what a Megatron training allocates for its experts."""

import gc
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ..training_run import flags, train

FSSDP, EP = "fssdp reshard_interval=2 slots=1 overlap_degree=1", "ep"

# name: (ranks, Megatron's arguments, bytes of an element's parameter, main_grad and optimizer state)
LAYOUTS = {
    "fp32": (2, "", (4, 4, 8)),
    "bf16_distributed": (4, "--bf16 --use-distributed-optimizer", (2, 4, 12)),
    "fp32_distributed": (4, "--use-distributed-optimizer", (4, 4, 8)),
    "bf16": (2, "--bf16", (2, 4, 12)),
    "bf16_gradients_in_half": (2, "--bf16 --grad-reduce-in-bf16", (2, 2, 12)),
    "momentum": (2, "--optimizer sgd", (4, 4, 4)),
    "no_momentum": (2, "--optimizer sgd --sgd-momentum 0", (4, 4, 0)),
    "bf16_momentum": (2, "--bf16 --optimizer sgd", (2, 4, 8)),
}
SLOTS = 8  # two layers of four experts
EXPERT_ELEMENTS = 2 * 32 * 64 + 64 + 32


@pytest.mark.parametrize(
    "name", [*list(LAYOUTS)[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in list(LAYOUTS)[2:])]
)
def test_accounted_bytes_equal_allocated_bytes(name: str, text_data: Path, tmp_path: Path) -> None:
    """After re-shards, sizes hold and each rank's optimizer part is as large as under plain EP."""
    world_size, layout, element_bytes = LAYOUTS[name]
    copies = world_size // 2
    found = {}
    for strategy in (FSSDP, EP):
        folder = tmp_path / strategy.split()[0]
        folder.mkdir()
        arguments = f"--expert-model-parallel-size 2 --train-iters 4 {layout} {flags(strategy)}"
        environment = {"MEASURED": str(folder)}
        train(world_size, arguments, text_data, before=measure_in_training, env=environment)
        found[strategy] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    of_parameter, of_gradient, of_optimizer = (SLOTS * EXPERT_ELEMENTS * size for size in element_bytes)
    shares = copies if "distributed" in layout else 1
    for ranks in found.values():
        for rank in ranks:
            assert rank["allocated"]["parameters"] == rank["accounted"]["parameters"] == of_parameter
            assert rank["allocated"]["gradients"] == rank["accounted"]["gradients"] == of_gradient
            assert rank["accounted"]["optimizer"] == of_optimizer // shares
        # The ranks that share a distributed optimizer have equal parts of all its parameters, and so
        # nearly equal ones of the experts'.
        allocated = [rank["allocated"]["optimizer"] for rank in ranks]
        assert sum(allocated) == sum(rank["accounted"]["optimizer"] for rank in ranks)
        assert shares > 1 or set(allocated) == {of_optimizer}
    moved, plain = found[FSSDP], found[EP]
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
def test_each_micro_batch_in_flight_has_its_own_replicas(name: str, text_data: Path, tmp_path: Path) -> None:
    """Count the weights of all replicas after a gather, in a pipeline of two stages of two ranks."""
    arguments, layers_of_stage = PIPELINES[name]
    arguments = (
        "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --train-iters 3 "
        f"--global-batch-size 16 {arguments} {flags('fastermoe slots=2 FSSDP_PROFILE_ITERATIONS=1')}"
    )
    train(4, arguments, text_data, before=shadow_and_measure, env={"MEASURED": str(tmp_path)})
    for rank in range(4):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["accounted"] == layers_of_stage[rank // 2] * 2 * EXPERT_ELEMENTS * 4
        # Experts of each group's first rank are shadowed.
        assert found["allocated"] == (found["accounted"] if rank % 2 else 0)


def test_growing_batches_are_accounted_with_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import num_microbatches_calculator

    from megatron_fssdp.megatron_adapter.training.memory_report import _most_micro_batches

    monkeypatch.setattr(num_microbatches_calculator, "get_num_microbatches", lambda: 2)
    args = SimpleNamespace(micro_batch_size=2, data_parallel_size=4, step_batch_size_schedule=None)
    assert _most_micro_batches(args) == 2
    args.step_batch_size_schedule = "0:16 1B:64, 2B:32"
    assert _most_micro_batches(args) == 8
    args.step_batch_size_schedule = "0:8"  # of a run that has been resumed on more devices
    assert _most_micro_batches(args) == 2


# ---------------------------------------------------------------- on the ranks


def shadow_and_measure() -> None:
    """Shadow the first experts for any counts, and write the largest number of bytes that replicas had."""
    from megatron_fssdp.megatron_adapter.training.iteration_driver import IterationDriver
    from megatron_fssdp.megatron_adapter.training.memory_report import account_memory
    from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
    from megatron_fssdp.runtime.slots.replica_slots import ReplicaSlots
    from megatron_fssdp.strategies.papers import fastermoe as dynamic_shadowing

    dynamic_shadowing.select_shadows = lambda *_, most, **__: tuple(range(most))
    start, end = SlotLayer.rows_travel, IterationDriver.end
    allocated: list[int] = []
    gc.freeze()  # objects that exist already are not searched

    def start_and_measure(layer: Any) -> None:
        start(layer)  # The gather of this micro-batch's replicas has started now.
        here = [item for item in gc.get_objects() if isinstance(item, ReplicaSlots)]
        flats = [flat for slots in here for flat in slots.weights().values()]
        allocated.append(sum(flat.untyped_storage().nbytes() for flat in flats))

    def end_and_write(driver: Any) -> Any:
        memory = account_memory(driver._session, driver._args, driver.held)
        found = {"accounted": memory.replica_parameters_bytes, "allocated": max(allocated)}
        write(found)
        return end(driver)

    SlotLayer.rows_travel = start_and_measure
    IterationDriver.end = end_and_write


def measure_in_training() -> None:
    """At the end of every iteration, write the bytes of this rank's experts to a file."""
    from megatron_fssdp.megatron_adapter.training.iteration_driver import IterationDriver
    from megatron_fssdp.megatron_adapter.training.memory_report import account_memory

    end = IterationDriver.end
    moved: list[int] = []

    def end_and_measure(driver: Any) -> Any:
        loads = end(driver)
        if driver.reshard is not None:
            moved.append(driver.reshard.experts_moved)
        memory = account_memory(driver._session, driver._args, driver.held)
        parameters = [parameter for slot in driver._session.slots.parameters for parameter in slot]
        measured = {
            "moved": sum(moved),
            "accounted": {
                "parameters": memory.slot_parameters_bytes,
                "gradients": memory.slot_gradients_bytes,
                "optimizer": memory.optimizer_bytes,
                "replicas": memory.above_expert_parallelism_bytes,
            },
            "allocated": {
                "parameters": num_bytes(parameters),
                "gradients": num_bytes(parameter.main_grad for parameter in parameters),
                "optimizer": sum(num_bytes(states(driver._optimizer, p)) for p in parameters),
            },
        }
        write(measured)
        return loads

    IterationDriver.end = end_and_measure


def write(measured: dict[str, Any]) -> None:
    (Path(os.environ["MEASURED"]) / f"{dist.get_rank()}.json").write_text(json.dumps(measured))


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def states(optimizer: Any, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    """What the optimizer keeps for a Parameter: master weights and states of its size."""
    kept: list[torch.Tensor] = []
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(member, "model_param_group_index_map"):
            place = member.model_param_group_index_map.get(parameter)
            if place is None:
                continue
            main = member.optimizer.param_groups[place[0]]["params"][place[1]]
        else:
            main = getattr(parameter, "main_param", parameter)
            if not any(main is other for other in member.get_parameters()):
                continue
        if main.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            kept.append(main)
        kept += [
            value
            for value in member.optimizer.state.get(main, {}).values()
            if torch.is_tensor(value) and value.dim()
        ]
    return kept
