"""Stock models whose experts are in other slots than Megatron assigned."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_fssdp.megatron_adapter.experts.expert_slots import StageOwners
from megatron_fssdp.planning.placement.owner_map import OwnerMap


def random_stage(
    rng: np.random.Generator, layer_numbers: Sequence[int], num_experts: int, num_devices: int
) -> StageOwners:
    """A random owner map, in which a device can own no or all experts of a layer."""
    places = rng.permutation(len(layer_numbers) * num_experts).reshape(len(layer_numbers), num_experts)
    slots = places.size // num_devices
    return StageOwners(OwnerMap(places // slots, places % slots, num_devices), tuple(layer_numbers))


def even_stage(stage: StageOwners) -> StageOwners:
    """Megatron's own owners of the same layers."""
    owners = stage.owners
    even = OwnerMap.even(owners.num_layers, owners.num_experts, owners.num_devices)
    return StageOwners(even, stage.layer_numbers)


def expert_modules(model: Sequence[torch.nn.Module]) -> dict[int, Any]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    layers = [module for chunk in model for module in chunk.modules() if isinstance(module, MoELayer)]
    return {layer.layer_number: layer.experts for layer in layers}


def state_bytes(optimizer: Any, parameters: Sequence[torch.nn.Parameter]) -> int:
    """Bytes that this rank's optimizer keeps for Parameters, beside them."""
    kept = [one for p in parameters for one in _optimizer_states(optimizer, p)]
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return num_bytes([one for one in kept if one.untyped_storage().data_ptr() not in storages])


def _optimizer_states(optimizer: Any, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    """The master weight, which can be the Parameter itself, and after a step states of its size."""
    states: list[Any] = []
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(member, "model_param_gbuf_map"):
            if parameter in member.model_param_gbuf_map:
                states = [*member._get_main_param_and_optimizer_states(parameter).values()]
        else:
            master = getattr(parameter, "main_param", parameter)
            if any(master is other for other in member.get_parameters()):
                states = [master, *member.optimizer.state.get(master, {}).values()]
    return [one.data for one in states if torch.is_tensor(one) and one.dim()]


def num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def follow_all(experts: Sequence[Any], current: Callable[[], StageOwners | None]) -> None:
    """Make the expert modules of a stock model follow an owner map, in the order of its layers."""
    from megatron_fssdp.megatron_adapter.checkpoints.expert_checkpoint import follow_owners

    for layer, module in enumerate(experts):
        follow_owners(module, layer, SimpleNamespace(stage_owners=current))
