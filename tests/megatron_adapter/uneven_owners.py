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


def optimizer_tensors(optimizer: Any, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    """Master weight and Adam's averages; no averages before the first step."""
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(member, "model_param_gbuf_map"):
            if parameter in member.model_param_gbuf_map:
                state = member._get_main_param_and_optimizer_states(parameter)
                return [state[name] for name in ("param", "exp_avg", "exp_avg_sq") if name in state]
            continue
        main = getattr(parameter, "main_param", parameter)
        if main in member.optimizer.state:
            state = member.optimizer.state[main]
            return [main.data, state["exp_avg"], state["exp_avg_sq"]]
    return []


def all_slot_tensors(
    model: Sequence[torch.nn.Module], optimizer: Any, stage: StageOwners
) -> list[torch.Tensor]:
    """Parameters and optimizer state of all slots of this device, in the order of the slots."""
    return [tensor for slot in _slots(model, optimizer, stage) for tensor in slot]


def _slots(model: Sequence[torch.nn.Module], optimizer: Any, stage: StageOwners) -> list[list[torch.Tensor]]:
    modules = expert_modules(model)
    experts = [expert for number in stage.layer_numbers for expert in modules[number].local_experts]
    return [
        [t for p in expert.parameters() for t in (p.data, *optimizer_tensors(optimizer, p))]
        for expert in experts
    ]


@torch.no_grad()
def permute_contents(model: Sequence[torch.nn.Module], optimizer: Any, stage: StageOwners) -> None:
    """Move the contents of evenly assigned slots to the slots that ``stage`` assigns."""
    slots = _slots(model, optimizer, stage)
    group = expert_modules(model)[stage.layer_numbers[0]].ep_group
    mine = torch.stack([torch.cat([tensor.reshape(-1).double() for tensor in slot]) for slot in slots])
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    for move in even_stage(stage).owners.moves_to(stage.owners):
        if move.device != group.rank():
            continue
        row = parts[move.source_device][move.source_slot]
        for tensor, values in zip(
            slots[move.slot], row.split([t.numel() for t in slots[move.slot]]), strict=True
        ):
            tensor.copy_(values.view_as(tensor))


def follow_all(experts: Sequence[Any], current: Callable[[], StageOwners | None]) -> None:
    """Make the expert modules of a stock model follow an owner map, in the order of its layers."""
    from megatron_fssdp.megatron_adapter.checkpoints.expert_checkpoint import follow_owners

    for layer, module in enumerate(experts):
        follow_owners(module, layer, current)
