"""Sharded state dicts of experts that are in other slots than in stock Megatron.

A ``torch_dist`` checkpoint identifies an expert by its layer and its number, which Megatron derives from the
expert module and the rank. Here both come from the owner map::

    slot 2 of device 0:   Megatron registered it for   expert 0 of layer 2
                          the owner map puts in it     expert 5 of layer 1
                          it is saved under the name   expert 5 of layer 1

Only layer and expert in the names and offsets of Megatron's entries are changed. Optimizer states follow,
because Megatron finds them by the identity of the Parameters. If all layers of a decoder are alike, the layer
is an axis of the stored tensor. Otherwise its number is a part of the key, which ``TransformerBlock`` and
``HybridStack`` write later, so that a wrapper around them corrects it afterwards.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import MethodType
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_fssdp.megatron_adapter.experts.expert_slots import SlotContent, StageOwners

ShardedStateDict = dict[str, Any]
CurrentOwners = Callable[[], StageOwners | None]

_OWNER_LAYER = "layer_number_by_fssdp"
_OTHER_RELEASE = "than the tested releases: install a tested release (megatron-fssdp doctor shows the range)"
# The number of a local expert in the keys of SequentialMLP and of TEGroupedMLP. Transformer Engine's name of
# the first extra state has no number.
_LOCAL_INDEX = re.compile(r"local_experts\.(\d+)\..*|.*\.(?:weight|bias|_extra_state)(\d*)")

_blocks_wrapped = False


def follow_owners(experts: Any, layer: int, current: CurrentOwners) -> None:
    """Make an expert module's sharded state dict follow the owner map.

    Call this when the layer of this index in the owner map is built. ``current`` returns the owners at the
    time of a save or a load. The first call also wraps ``TransformerBlock`` and ``HybridStack``, which
    changes nothing for other layers.
    """
    global _blocks_wrapped

    def by_owner(self: Any, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        return expert_sharded_state_dict(
            self, layer, self.ep_group.rank(), current(), prefix, sharded_offsets, metadata
        )

    experts.sharded_state_dict = MethodType(by_owner, experts)
    if not _blocks_wrapped:
        _blocks_wrapped = True
        for block in (TransformerBlock, HybridStack):
            block.sharded_state_dict = _with_correct_keys(block.sharded_state_dict)


def _with_correct_keys(stock: Callable[..., ShardedStateDict]) -> Callable[..., ShardedStateDict]:
    @wraps(stock)
    def block_state(self: Any, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        state = stock(self, prefix, sharded_offsets, metadata)
        _correct_layer_keys(state, f"{prefix}layers.")
        return state

    return block_state


def expert_sharded_state_dict(
    experts: Any,
    layer: int,
    device: int,
    stage: StageOwners | None,
    prefix: str = "",
    sharded_offsets: Any = (),
    metadata: dict[str, Any] | None = None,
) -> ShardedStateDict:
    """Return the sharded state dict of an expert module, with every slot named after the expert in it.

    Megatron registered the module, ``SequentialMLP`` or ``TEGroupedMLP``, for the layer of this index in the
    owner map. Without a ``stage``, its even distribution applies. Other arguments are those of its method.

    Raises:
        ValueError: A slot of the decoder holds an expert of multi-token prediction, or the reverse, or
            Megatron names experts in another way than the tested releases.
    """
    if stage is None or stage.owners.is_even:
        return type(experts).sharded_state_dict(experts, prefix, sharded_offsets, metadata)
    contents, number = stage.contents(device, layer), stage.layer_numbers[layer]
    _check_stays_in_decoder(number, contents, experts.config.num_layers)
    if [offset[:2] for offset in sharded_offsets] not in ([], [(0, number - 1)]):
        raise ValueError(
            f"sharded offsets of layer {number}: got {sharded_offsets}, wanted none or (0, {number - 1}, "
            f"layers); this Megatron numbers layers in another way {_OTHER_RELEASE}"
        )
    state: ShardedStateDict = type(experts).sharded_state_dict(experts, prefix, sharded_offsets, metadata)
    # With this option, each expert is a tensor of its own with its number in the key. Without it, experts
    # are an axis of one tensor.
    is_key = bool((metadata or {}).get("singleton_local_shards", False))
    for name, entry in state.items():
        found = _LOCAL_INDEX.fullmatch(name.removeprefix(prefix))
        if found is None:
            continue
        index = int(found[1] or found[2] or 0)
        registered, content = device * len(contents) + index, contents[index]
        if is_key:
            stem = f"{prefix}experts."
            entry.key = f"{stem}{content.expert}.{entry.key.removeprefix(f'{stem}{registered}.')}"
        move = _mover(len(sharded_offsets), None if is_key else registered, content)
        if isinstance(entry, ShardedTensorFactory):  # It makes several tensors of one, also of its states.
            entry.build_fn = partial(_build_and_move, entry.build_fn, move)
        else:
            move(entry)
        if not sharded_offsets:
            setattr(entry, _OWNER_LAYER, content.layer_number)
    return state


def _mover(num_layer_axes: int, registered: int | None, content: SlotContent) -> Callable[[Any], Any]:
    """A function that gives an entry the layer and the expert that are in its slot, where these are axes.

    If experts are an axis, ``registered`` is the one for which Megatron made the entry; otherwise, ``None``.
    """

    def move(entry: Any) -> Any:
        offset = list(entry.global_offset)
        if num_layer_axes:
            offset[0] = content.layer_number - 1
        if registered is not None:
            if offset[num_layer_axes] != registered:
                raise ValueError(
                    f"{entry.key}: got {offset[num_layer_axes]} on the expert axis, wanted {registered}; "
                    f"this Megatron stores experts in another way {_OTHER_RELEASE}"
                )
            offset[num_layer_axes] = content.expert
        entry.global_offset = tuple(offset)
        return entry

    return move


def _build_and_move(build: Callable[..., Any], move: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
    return [move(part) for part in build(*args, **kwargs)]


def _correct_layer_keys(state: ShardedStateDict, layers_prefix: str) -> None:
    """Correct the layer number in the keys of experts that are in slots of another layer, in place."""
    for entry in state.values():
        number = getattr(entry, _OWNER_LAYER, None)
        if number is None:
            continue
        written, dot, rest = entry.key.removeprefix(layers_prefix).partition(".")
        if not entry.key.startswith(layers_prefix) or not dot or not written.isdigit():
            raise ValueError(
                f"checkpoint key: got {entry.key}, wanted {layers_prefix} followed by a layer number; this "
                f"Megatron names layers in checkpoints in another way {_OTHER_RELEASE}"
            )
        entry.key = f"{layers_prefix}{number - 1}.{rest}"
        delattr(entry, _OWNER_LAYER)


def _check_stays_in_decoder(number: int, contents: Sequence[SlotContent], num_layers: int) -> None:
    layers = sorted({held.layer_number for held in contents})
    if max(number, *layers) > num_layers:
        raise ValueError(
            f"owner map: got slots of layer {number} that hold experts of layers {layers} in a model whose "
            f"decoder has {num_layers} layers, wanted layers of multi-token prediction to keep their "
            "experts, because their checkpoint keys have another form; leave these layers out of re-sharding"
        )
