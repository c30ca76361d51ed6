"""Sharded state dicts of experts that are in other slots than in stock Megatron.

A ``torch_dist`` checkpoint identifies an expert only by its layer and its number. Megatron derives both from
the expert module and the rank in the expert-parallel group. Here both come from the owner map::

    slot 2 of device 0:   Megatron registered it for   expert 0 of layer 2
                          the owner map puts in it     expert 5 of layer 1
                          it is saved under the name   expert 5 of layer 1

Keys, global shapes and replica numbers are Megatron's. The keys of the state dict itself name the local slot.
Optimizer states follow, because Megatron finds them by the identity of the Parameters. Under an even owner
map, Megatron's own methods run.

If all layers of a decoder are alike, the layer is an axis of the stored tensor. Otherwise the layer's number
is a part of the key. ``TransformerBlock`` and ``HybridStack`` write this number after the layer has returned
its state, so the wrapper around them corrects it afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, sharded_state_dict_default

from megatron_fssdp.megatron_adapter.experts.stage_owners import SlotContent, StageOwners

ShardedStateDict = dict[str, Any]
Offsets = tuple[tuple[int, int, int], ...]
CurrentOwners = Callable[[], StageOwners | None]

_OWNER_LAYER = "layer_number_by_fssdp"


_blocks_wrapped = False


def follow_owners(experts: Any, layer: int, current: CurrentOwners) -> None:
    """Make an expert module's sharded state dict follow the owner map.

    Call this when the layer is built, because models are built in several ways and a checkpoint may be
    loaded soon afterwards. The first call also wraps the method of ``TransformerBlock`` and ``HybridStack``,
    which changes nothing for other layers.

    Args:
        experts: Expert module of the layer. Its method ``sharded_state_dict`` is replaced.
        layer: Index of the layer in the owner map.
        current: Function that returns the owners at the time of a save or a load; ``None`` means that
            Megatron's even distribution applies.
    """
    experts.sharded_state_dict = MethodType(_state_by_owner(layer, current), experts)
    _wrap_blocks()


def _wrap_blocks() -> None:
    global _blocks_wrapped
    if _blocks_wrapped:
        return
    _blocks_wrapped = True
    for block in (TransformerBlock, HybridStack):
        block.sharded_state_dict = _with_correct_keys(block.sharded_state_dict)


def _with_correct_keys(stock: Callable[..., ShardedStateDict]) -> Callable[..., ShardedStateDict]:
    @wraps(stock)
    def block_state(self: Any, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        state = stock(self, prefix, sharded_offsets, metadata)
        correct_layer_keys(state, f"{prefix}layers.")
        return state

    return block_state


def _state_by_owner(layer: int, current: CurrentOwners) -> Callable[..., ShardedStateDict]:
    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        device = self.ep_group.rank()
        return expert_sharded_state_dict(self, layer, device, current(), prefix, sharded_offsets, metadata)

    return sharded_state_dict


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

    Args:
        experts: Megatron's expert module, ``SequentialMLP`` or ``TEGroupedMLP``.
        layer: Index, in the owner map, of the layer for which Megatron registered the module.
        device: This rank in the expert-parallel group.
        stage: Owners of the pipeline stage; ``None`` means Megatron's even distribution.
        prefix: Prefix of the keys, as in Megatron's method ``sharded_state_dict``.
        sharded_offsets: Layer axis of the stored tensors, or nothing, as in Megatron's method.
        metadata: Content metadata of the checkpoint, as in Megatron's method.

    Raises:
        ValueError: A slot of the decoder holds an expert of multi-token prediction, or the reverse.
    """
    if stage is None or stage.contents(device, layer) == stage.registered(device, layer):
        return type(experts).sharded_state_dict(experts, prefix, sharded_offsets, metadata)
    contents = stage.contents(device, layer)
    number = stage.layer_numbers[layer]
    _check_stays_in_decoder(number, contents, experts.config.num_layers)
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    # With this option, each expert is a tensor of its own with its number in the key. Without it, experts
    # are an axis of one tensor.
    singleton = bool(metadata.get("singleton_local_shards", False))
    places = [
        _place(content, number, tuple(sharded_offsets), stage.owners.num_experts, singleton)
        for content in contents
    ]
    if hasattr(experts, "local_experts"):
        return _sequential(experts, places, prefix, metadata)
    return _grouped(experts, places, prefix, tuple(sharded_offsets), metadata)


def correct_layer_keys(state: ShardedStateDict, layers_prefix: str) -> None:
    """Correct the layer number in the keys of experts that are in slots of another layer, in place.

    Args:
        state: Sharded state dict that a transformer block returned.
        layers_prefix: Prefix of the keys of its layers, up to the layer number.

    Raises:
        ValueError: A key does not have the form that Megatron gives it.
    """
    for entry in state.values():
        number = getattr(entry, _OWNER_LAYER, None)
        if number is None:
            continue
        written, dot, rest = entry.key.removeprefix(layers_prefix).partition(".")
        if not entry.key.startswith(layers_prefix) or not dot or not written.isdigit():
            raise ValueError(
                f"checkpoint key: got {entry.key}, wanted {layers_prefix} followed by a layer number; this "
                "Megatron names layers in checkpoints in another way than the tested releases: install a "
                "tested release (megatron-fssdp doctor shows the range)"
            )
        entry.key = f"{layers_prefix}{number - 1}.{rest}"
        delattr(entry, _OWNER_LAYER)


@dataclass(frozen=True)
class _Place:
    """Where the content of one slot belongs in a checkpoint.

    Attributes:
        expert: Number of the expert in its layer.
        offsets: Position in the stored tensor, as (axis, index, size) for the layer axis and the expert
            axis, if these axes exist.
        num_layer_axes: 1 if the layer is an axis of the stored tensor, 0 if its number is in the key.
        layer_in_key: Layer number for the key; ``None`` if the layer is an axis.
        expert_in_key: Whether the expert's number is in the key and not an axis.
    """

    expert: int
    offsets: Offsets
    num_layer_axes: int
    layer_in_key: int | None
    expert_in_key: bool

    def mark(self, entry: ShardedBase) -> None:
        """Store the layer number at the entry if :func:`correct_layer_keys` must write it into the key."""
        if self.layer_in_key is not None:
            setattr(entry, _OWNER_LAYER, self.layer_in_key)


def _place(
    content: SlotContent, number: int, layer_offsets: Offsets, num_experts: int, singleton: bool
) -> _Place:
    if [offset[:2] for offset in layer_offsets] not in ([], [(0, number - 1)]):
        raise ValueError(
            f"sharded offsets of layer {number}: got {layer_offsets}, wanted none or (0, {number - 1}, "
            "layers); this Megatron numbers layers in another way than the tested releases: install a "
            "tested release (megatron-fssdp doctor shows the range)"
        )
    offsets: Offsets = tuple((axis, content.layer_number - 1, size) for axis, _, size in layer_offsets)
    if not singleton:
        offsets = (*offsets, (len(layer_offsets), content.expert, num_experts))
    return _Place(
        expert=content.expert,
        offsets=offsets,
        num_layer_axes=len(layer_offsets),
        layer_in_key=None if layer_offsets else content.layer_number,
        expert_in_key=singleton,
    )


def _check_stays_in_decoder(number: int, contents: Sequence[SlotContent], num_layers: int) -> None:
    foreign = [held for held in contents if held.layer_number > num_layers or number > num_layers]
    if foreign:
        raise ValueError(
            f"owner map: got slots of layer {number} that hold experts of layers "
            f"{sorted({held.layer_number for held in contents})} in a model whose decoder has {num_layers} "
            "layers, wanted layers of multi-token prediction to keep their experts, because their checkpoint "
            "keys have another form; leave these layers out of re-sharding"
        )


def _sequential(
    experts: Any, places: Sequence[_Place], prefix: str, metadata: dict[str, Any]
) -> ShardedStateDict:
    state: ShardedStateDict = {}
    for index, (expert, place) in enumerate(zip(experts.local_experts, places, strict=True)):
        slot_prefix = f"{prefix}local_experts.{index}."
        slot_state = expert.sharded_state_dict(slot_prefix, place.offsets, metadata)
        number = f"{place.expert}." if place.expert_in_key else ""
        replace_prefix_for_sharding(slot_state, slot_prefix, f"{prefix}experts.{number}")
        for entry in slot_state.values():
            # An expert has a copy on each expert-data-parallel rank. Megatron's MLP numbers copies by the
            # data-parallel ranks of dense layers.
            entry.replica_id = (*entry.replica_id[:2], experts.dp_group.rank())
            place.mark(entry)
        state.update(slot_state)
    return state


def _grouped(
    experts: Any, places: Sequence[_Place], prefix: str, layer_offsets: Offsets, metadata: dict[str, Any]
) -> ShardedStateDict:
    state: ShardedStateDict = {}
    first = experts.ep_group.rank() * len(places)
    for name, module in experts._modules.items():
        entries = sharded_state_dict_default(
            module, f"{name}.", layer_offsets, metadata, tp_group=experts.tp_group
        )
        for index, place in enumerate(places):
            # Transformer Engine's name of the first extra state has no number.
            suffixes = (f"weight{index}", f"bias{index}", f"_extra_state{index or ''}")
            for key in (f"{name}.{suffix}" for suffix in suffixes):
                if key not in entries:
                    continue
                _relabel(entries[key], first + index, place)
                if name == "linear_fc1" and experts.config.gated_linear_unit and "_extra_state" not in key:
                    entries[key] = apply_swiglu_sharded_factory(
                        entries[key],
                        place.offsets,
                        place.expert_in_key,
                        tp_group=experts.tp_group,
                        dp_group=metadata["dp_cp_group"],
                    )
                place.mark(entries[key])
        # These are the names of SequentialMLP, so each module can load the other's checkpoints.
        singleton = places[0].expert_in_key
        old, new = ("", f"{prefix}experts.") if singleton else (f"{name}.", f"{prefix}experts.{name}.")
        replace_prefix_for_sharding(entries, old, new)
        state.update({f"{prefix}{key}": entry for key, entry in entries.items()})
    return state


def _relabel(entry: ShardedTensor | ShardedObject, registered: int, place: _Place) -> None:
    """Change an entry that Megatron made for the registered expert to name the expert in the slot."""
    if place.expert_in_key:
        entry.key = f"{place.expert}.{entry.key.removeprefix(f'{registered}.')}"
        return
    offset = list(entry.global_offset)
    axis = place.num_layer_axes
    if offset[axis] != registered:
        raise ValueError(
            f"{entry.key}: got {offset[axis]} on the expert axis, wanted {registered}; this Megatron stores "
            "grouped experts in another way than the tested releases: install a tested release "
            "(megatron-fssdp doctor shows the range)"
        )
    for position, index, _ in place.offsets:
        offset[position] = index
    entry.global_offset = tuple(offset)
