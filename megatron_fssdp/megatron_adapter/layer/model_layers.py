"""The MoE layers of a model: which of them join a strategy, and by which numbers reports know them."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.dispatchers.parm.schedule_selector import have_equal_tokens
from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer, groups_of
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession

# Subclasses that may join: their methods call Megatron's steps of a pass once, in its order, and know experts
# by number before ``preprocess`` alone.
_OF_HOSTS = (
    "megatron.bridge.models.gemma.modeling_gemma4.Gemma4MoELayer",
    "mcore_bridge.model.mm_gpts.gemma4.Gemma4MoELayer",
)


def join(model: torch.nn.Module, session: StrategySession) -> list[StrategyMoELayer]:
    """Let the trained MoE layers of a model chunk join a session. Collective over their groups.

    Raises:
        ConfigurationError: A layer is of a class that is not known, or cannot be served.
    """
    for layer in _layers(model):
        kind = type(layer)
        if kind is not MoELayer and (name := f"{kind.__module__}.{kind.__qualname__}") not in _OF_HOSTS:
            raise ConfigurationError(
                f"--moe-strategy {session.strategy_name}: got an MoE layer of class {name}, wanted "
                f"{MoELayer.__module__}.MoELayer; build the model from Megatron's MoE layer, attach one "
                "strategy before DDP wraps it, or use --moe-strategy none"
            )
        if kind is not MoELayer and have_equal_tokens(layer.config, groups_of(layer)):
            raise ConfigurationError(
                f"{kind.__qualname__}: got tensor parallelism without sequence parallelism, wanted both, "
                "because other steps than this layer's divide the tokens there; add --sequence-parallel, or "
                "use --moe-strategy none"
            )
    layers = trained_layers(model)
    return [StrategyMoELayer.of(layer, session, number, predicted) for layer, number, predicted in layers]


def trained_layers(model: torch.nn.Module) -> list[tuple[Any, int, bool]]:
    """The MoE layers of a model chunk with their numbers, and whether they are of multi-token prediction.

    If a model has two layers of the same number, as with a teacher inside, those whose experts are frozen are
    left out. If both are trained, as two pools of experts in ERNIE-4.5-VL, the second has 1000 more. Layers
    without a number have 0.
    """
    places = places_of(model)
    shared, taken, layers = Counter(places.values()), Counter[Any](), []
    for layer, (before, number) in places.items():
        place = before, number
        if shared[place] == 1 or any(parameter.requires_grad for parameter in layer.experts.parameters()):
            # Megatron numbers layers of multi-token prediction from 1 again. Here they follow the decoder's.
            first = 0 if before is None else layer.config.num_layers + before
            layers.append((layer, number and first + number + 1000 * taken[place], before is not None))
            taken[place] += 1
    return layers


def places_of(model: torch.nn.Module) -> dict[Any, tuple[int | None, int]]:
    """What tells apart the MoE layers of one model: where predicted tokens are, and their numbers."""
    before = dict(_predicted(model))
    return {layer: (before.get(layer), layer.layer_number or _gate_number(layer)) for layer in _layers(model)}


def _gate_number(layer: Any) -> int:
    # A pool of experts inside of another module has a number in its gate alone.
    return next((part.layer_number or 0 for part in layer.modules() if isinstance(part, Router)), 0)


def _layers(model: torch.nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, BaseMoELayer))


def _predicted(model: torch.nn.Module) -> Iterator[tuple[Any, int]]:
    """Layers of multi-token prediction, each with how many of them come before its pattern of layers.

    Megatron numbers the layers of each pattern from 1 again, and 0.19 does not tell a layer that it belongs
    to a pattern of a hybrid model.
    """
    for module in model.modules():
        if isinstance(module, MultiTokenPredictionLayer):
            before = (module.layer_number - 1) * len(module.mtp_layer_pattern or "")
            yield from ((layer, before) for layer in _layers(module))
