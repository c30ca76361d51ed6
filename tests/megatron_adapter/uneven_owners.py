"""Stock models whose experts are in other slots than Megatron assigned."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

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
    """The owner map of the same layers that Megatron itself uses."""
    owners = stage.owners
    even = OwnerMap.even(owners.num_layers, owners.num_experts, owners.num_devices)
    return StageOwners(even, stage.layer_numbers)


def expert_modules(model: Sequence[torch.nn.Module]) -> dict[int, Any]:
    """Expert modules of a rank's model chunks by layer number."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    layers = [module for chunk in model for module in chunk.modules() if isinstance(module, MoELayer)]
    return {layer.layer_number: layer.experts for layer in layers}


def optimizer_states(optimizer: Any, parameter: torch.nn.Parameter) -> tuple[int, dict[str, torch.Tensor]]:
    """What this rank's optimizer keeps for a Parameter: the first element of its part, and tensors by name.

    They are the master weight, which can be the Parameter itself, and after a step states of its size.
    """
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(member, "model_param_gbuf_map"):
            if parameter in member.model_param_gbuf_map:
                first = member._get_model_param_range_map(parameter)["param"].start
                states = dict(member._get_main_param_and_optimizer_states(parameter))
                return first, _of_its_size(master=states.pop("param"), **states)
        else:
            master = getattr(parameter, "main_param", parameter)
            if any(master is other for other in member.get_parameters()):
                return 0, _of_its_size(master=master, **member.optimizer.state.get(master, {}))
    return 0, {}


def _of_its_size(**states: Any) -> dict[str, torch.Tensor]:
    return {name: one.data for name, one in states.items() if torch.is_tensor(one) and one.dim()}


def state_bytes(optimizer: Any, parameters: Sequence[torch.nn.Parameter]) -> int:
    """Bytes that this rank's optimizer keeps for Parameters, beside them."""
    kept = [one for p in parameters for one in optimizer_states(optimizer, p)[1].values()]
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return num_bytes([one for one in kept if one.untyped_storage().data_ptr() not in storages])


def num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the elements of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@torch.no_grad()
def permute_contents(model: Sequence[torch.nn.Module], optimizer: Any, stage: StageOwners) -> None:
    """Move Parameters and optimizer states of evenly assigned slots to the slots that ``stage`` assigns."""
    modules = expert_modules(model)
    experts = [expert for number in stage.layer_numbers for expert in modules[number].local_experts]
    slots = [
        [t for p in expert.parameters() for t in (p.data, *optimizer_states(optimizer, p)[1].values())]
        for expert in experts
    ]
    group = modules[stage.layer_numbers[0]].ep_group
    mine = torch.stack([torch.cat([tensor.reshape(-1).double() for tensor in slot]) for slot in slots])
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    for move in even_stage(stage).owners.moves_to(stage.owners):
        if move.device != group.rank():
            continue
        row = parts[move.source_device][move.source_slot]
        sizes = [tensor.numel() for tensor in slots[move.slot]]
        for tensor, values in zip(slots[move.slot], row.split(sizes), strict=True):
            tensor.copy_(values.view_as(tensor))


def follow_all(experts: Sequence[Any], current: Callable[[], StageOwners | None]) -> None:
    """Make the expert modules of a stock model follow an owner map, in the order of its layers."""
    from megatron_fssdp.megatron_adapter.checkpoints.expert_checkpoint import follow_owners

    for layer, module in enumerate(experts):
        follow_owners(module, layer, current)
