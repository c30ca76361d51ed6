"""Sharded state dicts of experts that are in other slots than in stock Megatron.

A ``torch_dist`` checkpoint identifies an expert by its layer and its number, which Megatron derives from the
expert module and the rank. Here both come from the owner map::

    slot 2 of device 0:   Megatron registered it for   expert 0 of layer 2
                          the owner map puts in it     expert 5 of layer 1
                          it is saved under the name   expert 5 of layer 1

Optimizer states follow, because Megatron finds them by the identity of the Parameters. If all layers of a
decoder are alike, the layer is an axis of the stored tensor. Otherwise its number is a part of the key, which
``TransformerBlock`` and ``HybridStack`` write later, so that a wrapper around them corrects it afterwards.
"""

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_fssdp.megatron_adapter.experts.expert_slots import ExpertSlots
from megatron_fssdp.megatron_adapter.wrapping import wrap

ShardedStateDict = dict[str, Any]

_OWNER_LAYER = "layer_number_by_fssdp"
_SLOTS = "slots_of_fssdp"
# The number of a local expert in the keys of SequentialMLP and of TEGroupedMLP. Transformer Engine's name of
# the first extra state has no number.
_LOCAL_INDEX = re.compile(r"local_experts\.(\d+)\..*|.*\.(?:weight|bias|_extra_state)(\d*)")


def follow_owners(experts: Any, layer: int, slots: ExpertSlots) -> None:
    """Make the sharded state dict of a layer's experts follow the owner map, in which it has this index."""
    experts.sharded_state_dict = partial(_state_by_owner, experts, layer, slots)
    _wrap_blocks()


def slots_in(sharded_state_dict: Any) -> list[ExpertSlots]:
    """The slots whose experts are in a sharded state dict; a host may have left them out."""
    found = (getattr(entry, _SLOTS, None) for entry in nested_values(sharded_state_dict))
    return list({id(slots): slots for slots in found if slots is not None}.values())


@cache  # once in a process; it changes nothing for layers that do not follow an owner map
def _wrap_blocks() -> None:
    wrap(TransformerBlock, "sharded_state_dict", _block_state)
    wrap(HybridStack, "sharded_state_dict", _block_state)


def _state_by_owner(
    experts: Any,
    layer: int,
    slots: ExpertSlots,
    prefix: str = "",
    sharded_offsets: Any = (),
    metadata: Any = None,
) -> ShardedStateDict:
    form = (metadata or {}).get("distrib_optim_sharding_type")
    if form not in (None, *DistributedOptimizer.checkpoint_fully_reshardable_formats):
        slots.go_home()  # Other formats store optimizer states by their position in a bucket.
    state: ShardedStateDict = type(experts).sharded_state_dict(experts, prefix, sharded_offsets, metadata)
    for entry in state.values():
        setattr(entry, _SLOTS, slots)
    stage, device = slots.stage_owners(), experts.ep_group.rank()
    if stage is None or stage.owners.is_even:
        return state
    contents, number = stage.contents(device, layer), stage.layer_numbers[layer]
    axes = [offset[:2] for offset in sharded_offsets]
    if axes not in ([], [(0, number - 1)]):
        raise _other_names(f"sharded offsets of layer {number}", axes, f"none or [(0, {number - 1})]")
    # With this option, each expert is a tensor of its own with its number in the key. Without it, experts
    # are an axis of one tensor, after that of layers if there is one.
    is_key = bool((metadata or {}).get("singleton_local_shards", False))

    def move(registered: int, layer_number: int, expert: int, entry: Any) -> Any:
        offset = list(entry.global_offset)
        if axes:
            offset[0] = layer_number - 1
        if not is_key:
            if offset[len(axes)] != registered:
                raise _other_names(f"expert axis of {entry.key}", offset[len(axes)], registered)
            offset[len(axes)] = expert
        entry.global_offset = tuple(offset)
        return entry

    for name, entry in state.items():
        found = _LOCAL_INDEX.fullmatch(name.removeprefix(prefix))
        if found is None:
            continue
        index = int(found[1] or found[2] or 0)
        registered, (layer_number, expert) = device * len(contents) + index, contents[index]
        if is_key:
            stem = f"{prefix}experts."
            entry.key = f"{stem}{expert}.{entry.key.removeprefix(f'{stem}{registered}.')}"
        moved = partial(move, registered, layer_number, expert)
        if isinstance(entry, ShardedTensorFactory):  # It makes several tensors of one, also of its states.
            entry.build_fn = partial(_build_and_move, entry.build_fn, moved)
        else:
            moved(entry)
        if not axes:
            setattr(entry, _OWNER_LAYER, layer_number)
    return state


def _build_and_move(build: Callable[..., Any], move: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
    return [move(part) for part in build(*args, **kwargs)]


def _block_state(
    stock: Any, block: Any, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
) -> ShardedStateDict:
    state, layers = stock(block, prefix, sharded_offsets, metadata), f"{prefix}layers."
    for entry in state.values():
        if (number := getattr(entry, _OWNER_LAYER, None)) is None:
            continue
        written, dot, rest = entry.key.removeprefix(layers).partition(".")
        if not entry.key.startswith(layers) or not dot or not written.isdigit():
            raise _other_names("checkpoint key", entry.key, f"{layers} followed by a layer number")
        entry.key = f"{layers}{number - 1}.{rest}"
        delattr(entry, _OWNER_LAYER)
    return state


def _other_names(what: str, got: object, wanted: object) -> ValueError:
    return ValueError(
        f"{what}: got {got}, wanted {wanted}; this Megatron names experts in checkpoints in another way than "
        "the tested releases: install a tested release (megatron-fssdp doctor shows the range)"
    )
