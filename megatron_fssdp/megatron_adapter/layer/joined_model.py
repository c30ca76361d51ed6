"""Lets the MoE layers of a built model join a session, in Megatron's GPT, BERT, hybrid and other models."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession


def join(model: torch.nn.Module, session: StrategySession) -> list[StrategyMoELayer]:
    """Let the trained MoE layers of a model chunk join a session. Collective over their groups.

    Raises:
        ConfigurationError: A layer is of a class that is not known, or cannot be served.
    """
    for layer in _layers(model):
        if type(layer) is not MoELayer:
            raise ConfigurationError(
                f"--moe-strategy {session.strategy_name}: got an MoE layer of class {type(layer).__module__}."
                f"{type(layer).__qualname__}, wanted {MoELayer.__module__}.MoELayer; build the model from "
                "Megatron's MoE layer, attach one strategy before DDP wraps it, or use --moe-strategy none"
            )
    return [StrategyMoELayer.of(layer, session, before) for layer, before in trained_layers(model)]


def trained_layers(model: torch.nn.Module) -> list[tuple[Any, int | None]]:
    """The MoE layers of a model chunk, each with how many come before its pattern of layers, if it is in one.

    If a model has two layers of the same number, as with a teacher inside, those whose experts are frozen are
    left out.
    """
    places = _places(model)
    numbers = Counter(places.values())
    return [
        (layer, place[0])
        for layer, place in places.items()
        if numbers[place] == 1 or any(parameter.requires_grad for parameter in layer.experts.parameters())
    ]


def numbers_of(model: torch.nn.Module) -> set[tuple[int | None, int]]:
    """What tells apart the MoE layers of one model: their numbers, and where predicted tokens are."""
    return set(_places(model).values())


def _places(model: torch.nn.Module) -> dict[Any, tuple[int | None, int]]:
    before = dict(_predicted(model))
    return {layer: (before.get(layer), layer.layer_number or 0) for layer in _layers(model)}


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
