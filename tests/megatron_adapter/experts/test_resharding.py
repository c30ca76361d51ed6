"""Re-sharding moves slot contents between Megatron's Parameters, with all of their optimizer state.

The trainings use stock layers, which do not know owner maps. An uneven map therefore changes the model
until the contents are moved back.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.planning.placement.owner_map import OwnerMap

from ..training_run import (
    assert_close,
    assert_equal,
    before_iterations,
    relative_difference,
    rows,
    slow,
    train,
)
from ..uneven_owners import num_bytes, optimizer_states

# name | ranks | Megatron's arguments
LAYOUTS = rows(
    """
    fp32 | 2 | {EP2}
    bf16_distributed_in_parts_overlaps | 4 | {EP2} --bf16 {OVERLAPS}
    fp32_distributed_interleaved_pipeline_overlaps | 4 | {EP2} {INTERLEAVED} {OVERLAPS}
    bf16 | 4 | {EP4} --bf16
    bf16_distributed | 2 | {EP2} --bf16 {DISTRIBUTED}
    fp32_distributed_in_parts_overlaps | 4 | {EP2} {OVERLAPS}
    fp16_in_copies | 4 | {EP2} --fp16 --initial-loss-scale 1024
    sgd | 2 | {EP2} --optimizer sgd
    strategy_layers | 4 | {EP2} {OVERLAPS} --moe-strategy ep
    """
)
FIRST, SECOND, *SLOW = LAYOUTS


@pytest.mark.parametrize("name", [FIRST, SECOND, *slow(SLOW)])
def test_a_reshard_and_its_reverse_restore_all_contents(name: str, text_data: Path) -> None:
    """In iteration 1 there is no optimizer state yet; before iteration 4 there was an earlier re-shard."""
    world_size, arguments = int(LAYOUTS[name][0]), f"{LAYOUTS[name][1]} --train-iters 5"
    undisturbed = train(world_size, arguments, text_data)
    before = partial(reshard_before, {1: [1, "even"], 3: [2, 3, "even"], 4: [4, "even"]})
    moved = train(world_size, arguments, text_data, before=before)
    assert len(moved.losses) == 5
    assert_equal(moved, undisturbed)


@pytest.mark.slow
def test_resharded_training_is_equal_with_and_without_the_distributed_optimizer(text_data: Path) -> None:
    """The permuted model is the same, wherever the optimizer keeps its states."""
    arguments, before = "{EP2} --train-iters 6", partial(reshard_before, {3: [5], 5: [6]})
    undisturbed = train(4, arguments, text_data)
    plain = train(4, arguments, text_data, before=before)
    overlapped = train(4, f"{arguments} {{OVERLAPS}}", text_data, before=before)
    assert relative_difference(plain.losses[2:], undisturbed.losses[2:]) > 1e-5
    assert_close(overlapped, plain, 1e-6, 1e-5)


@pytest.mark.slow
def test_a_resumed_run_can_reshard(text_data: Path, tmp_path: Path) -> None:
    """After a resume, Adam's step is still one number for all experts; else the slots would be refused."""
    layout = "{EP2} {DISTRIBUTED} {TORCH_DIST} --train-iters 5"
    whole = train(4, layout, text_data)
    train(4, f"{layout} --exit-interval 3 --save {tmp_path} --save-interval 3", text_data)
    before = partial(reshard_before, {4: [1, 2, "even"], 5: [3, "even"]})
    rest = train(4, f"{layout} --load {tmp_path}", text_data, before=before)
    assert rest.losses == whole.losses[3:]


def test_slots_that_are_not_interchangeable_are_refused_on_all_ranks(text_data: Path) -> None:
    arguments = "{EP2} --train-iters 3 {OVERLAPS}"
    undisturbed = train(4, arguments, text_data)
    tried = train(4, arguments, text_data, before=try_what_is_refused)
    assert tried.losses == undisturbed.losses, "a refused re-shard moved something"


# ---------------------------------------------------------------- on the ranks


def reshard_before(maps: dict[int, list[Any]]) -> None:
    """Before iterations, permute the slots by the maps that are named for them."""
    current: list[OwnerMap] = []

    def reshard(iteration: int, model: Any, optimizer: Any) -> None:
        for seed in maps.get(iteration, []):
            even = _even_map(model)
            old = current[-1] if current else even
            current.append(even if seed == "even" else _random_map(even, seed))
            _reshard_and_check(model, optimizer, old, current[-1])

    before_iterations(reshard)


def try_what_is_refused() -> None:
    before_iterations(lambda iteration, *built: iteration == 2 and _try_what_is_refused(*built))


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
    slot_bytes = num_bytes(
        [
            value
            for (layer, expert, position, name), value in wanted.items()
            # A master of the Parameter's own dtype is the Parameter.
            if (layer, expert) == (0, 0)
            and (name != "master" or value.dtype != resharding.slots[0][position].dtype)
        ]
    )
    assert report.bytes_moved == slot_bytes * sum(move.source_device != move.device for move in moves)


def _held(resharding: Any) -> Iterator[tuple[int, int, str, int, torch.Tensor]]:
    """Everything that this rank holds of the experts: (slot, position, name, first element, flat piece)."""
    for slot, parameters in enumerate(resharding.slots):
        for position, parameter in enumerate(parameters):
            yield slot, position, "weights", 0, parameter.data.view(-1)
            start, states = optimizer_states(resharding.optimizer, parameter)
            for name, tensor in states.items():
                yield slot, position, name, start, tensor.view(-1)


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
