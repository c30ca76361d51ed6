"""Re-sharding moves slot contents between Megatron's Parameters, with all of their optimizer state.

The trainings use stock layers, which do not know owner maps. An uneven map therefore changes the model
until the contents are moved back.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.planning.placement.owner_map import OwnerMap

from ..training_run import relative_difference, train

OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

# name: (ranks, Megatron's arguments)
SHORT = ("fp32", "bf16_distributed_in_parts_overlaps")
LAYOUTS = {
    "fp32": (2, "--expert-model-parallel-size 2"),
    "bf16_distributed_in_parts_overlaps": (4, f"--expert-model-parallel-size 2 --bf16 {OVERLAPS}"),
    "fp32_distributed_interleaved_pipeline_overlaps": (
        4,
        "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 "
        f"--num-layers-per-virtual-pipeline-stage 1 {OVERLAPS}",
    ),
    "bf16": (4, "--expert-model-parallel-size 4 --bf16"),
    "bf16_distributed": (2, "--expert-model-parallel-size 2 --bf16 --use-distributed-optimizer"),
    "fp32_distributed_in_parts_overlaps": (4, f"--expert-model-parallel-size 2 {OVERLAPS}"),
    "fp16_in_copies": (4, "--expert-model-parallel-size 2 --fp16 --initial-loss-scale 1024"),
    "sgd": (2, "--expert-model-parallel-size 2 --optimizer sgd"),
    "strategy_layers": (4, f"--expert-model-parallel-size 2 --moe-strategy ep {OVERLAPS}"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in SHORT)) for name in LAYOUTS]
)
def test_a_reshard_and_its_reverse_restore_all_contents(name: str, text_data: Path) -> None:
    """In iteration 1 there is no optimizer state yet; before iteration 4 there was an earlier re-shard."""
    world_size, layout = LAYOUTS[name]
    arguments = f"{layout} --train-iters 5"
    undisturbed = train(world_size, arguments, text_data)
    maps = {"1": [1, "even"], "3": [2, 3, "even"], "4": [4, "even"]}
    moved = train(
        world_size, arguments, text_data, before=reshard_in_train_step, env={"RESHARDS": json.dumps(maps)}
    )
    assert len(moved.losses) == 5
    assert moved.losses == undisturbed.losses
    assert moved.grad_norms == undisturbed.grad_norms


@pytest.mark.slow
def test_resharded_training_is_equal_with_and_without_the_distributed_optimizer(text_data: Path) -> None:
    """The permuted model is the same, wherever the optimizer keeps its states."""
    arguments = "--expert-model-parallel-size 2 --train-iters 6"
    env = {"RESHARDS": json.dumps({"3": [5], "5": [6]})}
    undisturbed = train(4, arguments, text_data)
    plain = train(4, arguments, text_data, before=reshard_in_train_step, env=env)
    overlapped = train(4, f"{arguments} {OVERLAPS}", text_data, before=reshard_in_train_step, env=env)
    assert relative_difference(plain.losses[2:], undisturbed.losses[2:]) > 1e-5
    assert relative_difference(overlapped.losses, plain.losses) <= 1e-6
    assert relative_difference(overlapped.grad_norms, plain.grad_norms) <= 1e-5


@pytest.mark.slow
def test_a_resumed_run_can_reshard(text_data: Path, tmp_path: Path) -> None:
    """After a resume, Adam's step is still one number for all experts; else the slots would be refused."""
    layout = (
        "--expert-model-parallel-size 2 --use-distributed-optimizer --ckpt-format torch_dist --train-iters 5"
    )
    whole = train(4, layout, text_data)
    train(4, f"{layout} --exit-interval 3 --save {tmp_path} --save-interval 3", text_data)
    env = {"RESHARDS": json.dumps({"1": [1, 2, "even"], "2": [3, "even"]})}  # counted from the resume
    rest = train(4, f"{layout} --load {tmp_path}", text_data, before=reshard_in_train_step, env=env)
    assert rest.losses == whole.losses[3:]


def test_slots_that_are_not_interchangeable_are_refused_on_all_ranks(text_data: Path) -> None:
    arguments = f"--expert-model-parallel-size 2 --train-iters 3 {OVERLAPS}"
    undisturbed = train(4, arguments, text_data)
    tried = train(4, arguments, text_data, before=try_what_is_refused)
    assert tried.losses == undisturbed.losses, "a refused re-shard moved something"


# ---------------------------------------------------------------- on the ranks


def reshard_in_train_step() -> None:
    """Before an iteration, permute the slots by the maps that RESHARDS names for it."""
    maps = {int(iteration): seeds for iteration, seeds in json.loads(os.environ["RESHARDS"]).items()}
    iterations = iter(range(1, 1000))
    current: list[OwnerMap] = []

    def before(model: list[Any], optimizer: Any) -> None:
        for seed in maps.get(next(iterations), []):
            even = _even_map(model)
            old = current[-1] if current else even
            new = even if seed == "even" else _random_map(even, seed)
            _reshard_and_check(model, optimizer, old, new)
            current.append(new)

    _call_before_train_step(before)


def try_what_is_refused() -> None:
    iterations = iter(range(1, 1000))
    _call_before_train_step(lambda *built: next(iterations) == 2 and _try_what_is_refused(*built))


def _call_before_train_step(before: Any) -> None:
    from megatron.training import training

    step = training.train_step

    def train_step(forward: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before(model, optimizer)
        return step(forward, data, model, optimizer, *args, **kwargs)

    training.train_step = train_step


def _layers(model: list[Any]) -> list[Any]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return [module for chunk in model for module in chunk.modules() if isinstance(module, MoELayer)]


def _even_map(model: list[Any]) -> OwnerMap:
    from megatron.core import parallel_state

    layers, devices = _layers(model), parallel_state.get_expert_model_parallel_world_size()
    return OwnerMap.even(len(layers), layers[0].config.num_moe_experts, devices)


def _random_map(even: OwnerMap, seed: int) -> OwnerMap:
    places = np.random.default_rng(seed).permutation(even.device_LE.size).reshape(even.device_LE.shape)
    return OwnerMap(places // even.slots_per_device, places % even.slots_per_device, even.num_devices)


def _resharding(model: list[Any], optimizer: Any, parts: Any = None, **options: Any) -> Any:
    from megatron.core import parallel_state

    from megatron_fssdp.megatron_adapter.experts.resharding import ExpertResharding
    from megatron_fssdp.megatron_adapter.experts.slot_experts import expert_parameters

    return ExpertResharding(
        slots=[
            slot for one in _layers(model) for slot in expert_parameters(one.experts, one.num_local_experts)
        ],
        expert_parallel=parallel_state.get_expert_model_parallel_group(),
        expert_data_parallel=parts or parallel_state.get_expert_data_parallel_group(),
        model_chunks=model,
        optimizer=optimizer,
        **options,
    )


def _reshard_and_check(model: list[Any], optimizer: Any, old: OwnerMap, new: OwnerMap) -> None:
    # The buffer is so small that parameters are cut into pieces, and pieces span several ranks' parts.
    resharding = _resharding(model, optimizer, buffer_bytes=20_000)
    device = resharding.expert_parallel.rank()
    wanted = _contents_by_expert(resharding, old)
    held = [(*place, piece.clone()) for *place, piece in _held(resharding)]
    changed = sum(
        not _same_bits(piece, _stretch(wanted, new.expert_in(device, slot), position, name, start, piece))
        for slot, position, name, start, piece in held
    )
    moves = old.moves_to(new)
    assert changed > len(held) // 4, "the check would not see contents that stay"

    report = resharding.execute(old, new)

    def check() -> None:
        for slot, position, name, start, piece in _held(resharding):
            expert = new.expert_in(device, slot)
            assert _same_bits(piece, _stretch(wanted, expert, position, name, start, piece)), (
                slot,
                position,
                name,
            )

    check()
    # Gathering the parameters again and the forward pre-hooks change nothing.
    for chunk in model:
        if getattr(chunk, "remove_forward_pre_hook_handles", None):
            for bucket_group in chunk.expert_parallel_bucket_groups:
                bucket_group.start_param_sync()
                bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)
    check()

    assert report.experts_moved == len(moves) > 0
    slot_bytes = sum(
        value.numel() * value.element_size()
        for (layer, expert, position, name), value in wanted.items()
        # A master of the Parameter's own dtype is the Parameter.
        if (layer, expert) == (0, 0)
        and (name != "master" or value.dtype != resharding.slots[0][position].dtype)
    )
    assert report.bytes_moved == slot_bytes * sum(move.source_device != move.device for move in moves)


def _held(resharding: Any) -> Iterator[tuple[int, int, str, int, torch.Tensor]]:
    """Everything that this rank holds of the experts: (slot, position, name, first element, flat piece)."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for slot, parameters in enumerate(resharding.slots):
        for position, parameter in enumerate(parameters):
            yield slot, position, "weights", 0, parameter.data.view(-1)
            for member in resharding.optimizer.chained_optimizers:
                start, tensors = 0, {}
                if isinstance(member, DistributedOptimizer):
                    if parameter in member.model_param_gbuf_map:
                        start = member._get_model_param_range_map(parameter)["param"].start
                        tensors = member._get_main_param_and_optimizer_states(parameter)
                        tensors["master"] = tensors.pop("param")
                else:
                    master = getattr(parameter, "main_param", parameter)
                    if any(master is other for other in member.get_parameters()):
                        tensors = {"master": master, **member.optimizer.state.get(master, {})}
                for name, tensor in tensors.items():
                    if torch.is_tensor(tensor) and tensor.dim():
                        yield slot, position, name, start, tensor.data.view(-1)


def _contents_by_expert(
    resharding: Any, owner_map: OwnerMap
) -> dict[tuple[int, int, int, str], torch.Tensor]:
    """All elements by (layer, expert, position, name), assembled from the optimizers' parts.

    Weights are the rounded master weights, because a weight buffer can still wait for an overlapped gather.
    """
    device = resharding.expert_parallel.rank()
    own = [
        (*owner_map.expert_in(device, slot), position, name, start, piece.clone())
        for slot, position, name, start, piece in _held(resharding)
        if name != "weights"
    ]
    parts: dict[tuple[int, int, int, str], dict[int, torch.Tensor]] = defaultdict(dict)
    in_row = _gather(own, resharding.expert_data_parallel)
    for *key, start, piece in _gather(in_row, resharding.expert_parallel):
        parts[tuple(key)][start] = piece
    whole = {key: torch.cat([pieces[start] for start in sorted(pieces)]) for key, pieces in parts.items()}
    dtypes = [parameter.dtype for parameter in resharding.slots[0]]
    for layer, expert, position, name in list(whole):
        if name == "master":
            rounded = whole[layer, expert, position, name].to(dtypes[position])
            whole[layer, expert, position, "weights"] = rounded
    for (_, _, position, _), value in whole.items():
        assert value.numel() == resharding.slots[0][position].numel()
    return whole


def _gather(items: list[Any], group: dist.ProcessGroup) -> list[Any]:
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, items, group=group)
    return [item for items in gathered for item in items]


def _stretch(
    contents: dict[tuple[int, int, int, str], torch.Tensor],
    expert: tuple[int, int],
    position: int,
    name: str,
    start: int,
    piece: torch.Tensor,
) -> torch.Tensor:
    return contents[*expert, position, name][start : start + piece.numel()]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _try_what_is_refused(model: list[Any], optimizer: Any) -> None:
    """Each time one rank of four differs; all ranks must raise an error."""
    resharding = _resharding(model, optimizer)
    even = _even_map(model)
    new = _random_map(even, 1)
    rank = dist.get_rank()
    expert = resharding.slots[0][0]
    member = next(m for m in optimizer.chained_optimizers if expert in m.buffers[0].param_to_bucket)
    group = next(group for group in member.optimizer.param_groups if group["params"])
    state = member.optimizer.state[group["params"][0]]

    def refused(what: str, error: type[Exception] = ConfigurationError, target: OwnerMap = new) -> None:
        with pytest.raises(error, match=what):
            resharding.execute(even, target)

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][rank]
    with pytest.raises(ConfigurationError, match="wanted every element on one rank"):
        _resharding(model, optimizer, parts=alone).execute(even, new)

    exp_avg = state["exp_avg"]
    kind = type(member)
    # Where a value is changed, its name, the odd rank's value, and the message.
    changes: list[tuple[Any, str, Any, str]] = [
        (group, "lr_mult", 0.5, "setting lr_mult: 0.5 and 1.0"),
        (state, "step", state["step"] + 1, "state step: 1.0 and 2.0"),
        (state, "exp_avg", exp_avg.bfloat16(), "got state exp_avg with .* torch.bfloat16"),
        (state, "row_means", torch.zeros(3), r"state row_means of shape \(3,\)"),
        (state, "max_exp_avg_sq", torch.zeros_like(exp_avg), "state max_exp_avg_sq: a tensor and none"),
        (vars(member.config), "optimizer_cpu_offload", True, "--optimizer-cpu-offload"),
    ]
    for odd_rank in (0, 3):
        for where, name, odd, message in changes:
            with patch.dict(where, {name: odd} if rank == odd_rank else {}):
                refused(message)
        if rank == odd_rank:
            member.__class__ = type("OtherOptimizer", (kind,), {})
        refused("in none of the optimizers .*OtherOptimizer")
        member.__class__ = kind
        refused("not the same on all", RuntimeError, _random_map(even, 2) if rank == odd_rank else new)
    refused("wanted 2 devices with 8 slots each", ValueError, OwnerMap.even(2, 8, 4))
    assert resharding.execute(even, even) is None
