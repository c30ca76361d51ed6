"""Copies of weights by name, as reinforcement learning and exports make them in the middle of a training.

``state_dict`` and ``load_state_dict`` name an expert by the place for which Megatron registered it. After a
re-shard, another expert is there, so a copy in or out would silently mean other experts. Both are refused
then, and :func:`restore_owners` brings all experts back to Megatron's order.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter import KEEP_OWNERS
from megatron_fssdp.megatron_adapter.experts.expert_slots import ExpertSlots
from megatron_fssdp.planning.placement.owner_map import OwnerMap

_RESTORE = "call megatron_fssdp.restore_owners(model) on all ranks between two iterations"


def check_named_copies(experts: torch.nn.Module, layer: int, slots: ExpertSlots) -> None:
    """Make the experts of a layer of the owner map refuse copies by name while names and contents disagree.

    Megatron's own loading of a ``torch_dist`` checkpoint has put the right contents under the names.
    """

    def before_state_dict(module: Any, prefix: str, *_: Any) -> None:
        _refuse_moved(slots, "state_dict", prefix)

    def before_load(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        if layer in slots.loading:
            slots.loading.remove(layer)
            return
        _refuse_moved(slots, "load_state_dict", prefix)
        if slots.has_residents:
            raise ConfigurationError(
                f"load_state_dict of {prefix.rstrip('.')}: got resident replicas, which would keep their old "
                "weights; wanted weights that are loaded before the first iteration; use another strategy "
                "than flexmoe to load them later"
            )

    experts.register_state_dict_pre_hook(before_state_dict)
    experts.register_load_state_dict_pre_hook(before_load)


def _refuse_moved(slots: ExpertSlots, what: str, prefix: str) -> None:
    if not slots.owners.is_even:
        raise ConfigurationError(
            f"{what} of {prefix.rstrip('.')}: got experts that a re-shard has moved, so that their names "
            f"mean other experts; wanted experts in Megatron's order; {_RESTORE}, copy weights through a "
            f"torch_dist checkpoint, or {KEEP_OWNERS}"
        )


def restore_owners(model: torch.nn.Module | Sequence[torch.nn.Module]) -> bool:
    """Move all experts back to where Megatron's names mean them; return whether any moved on this stage.

    All ranks must call it between two iterations: after the optimizer step and before the next forward pass.
    Optimizer states travel too. The order lasts until the strategy's next re-shard. ``model`` is Megatron's,
    or its chunks.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    members = (getattr(module, "slots", None) for chunk in chunks for module in chunk.modules())
    found = {id(slots): slots for slots in members if isinstance(slots, ExpertSlots)}
    moved = False
    for slots in found.values():
        if not (owners := slots.owners).is_even:
            even = OwnerMap.even(owners.num_layers, owners.num_experts, owners.num_devices)
            moved |= slots.move_to(even) is not None
    return moved
