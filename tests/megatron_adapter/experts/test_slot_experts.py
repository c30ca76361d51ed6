"""Hooks on experts, and wrappers around their linear layers, which users add to the built model."""

from itertools import product
from typing import Any

import pytest
import torch
from megatron.training.activation_logging import ActivationLogger

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.experts.slot_experts import _blank
from megatron_fssdp.testing.parallel_state import run_megatron_ranks

from ..layer.small_config import build_layer, moe_config, session_of

TOKENS, HIDDEN, EXPERTS = 24, 8, 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_slots_sum_in_the_data_type_of_their_neighbours(dtype: torch.dtype) -> None:
    weights = [torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)) for _ in range(2)]
    for one in weights:
        one.main_grad = torch.zeros_like(one, dtype=dtype)
    assert [one.main_grad.dtype for one in _blank(tuple(weights))] == [dtype, dtype]


def build(world_size: int, *, grouped: bool) -> Any:
    config = moe_config(world_size, HIDDEN, EXPERTS, moe_grouped_gemm=grouped)
    return build_layer(config, "fssdp", {"slots": 1, "overlap_degree": 2})


def draw(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=generator)
    return (hidden + 1).requires_grad_()  # A common direction: some experts are hot.


def test_hooks_on_the_expert_module_run_once_and_hooks_inside_are_refused() -> None:
    """Inside, a hook would see the rows of whatever expert is in a slot."""
    for found in run_megatron_ranks(_hooked, 2, ep=2):
        for name, (num_seen, difference, message) in found.items():
            assert num_seen == 2, name
            assert difference <= 1e-6, name
            assert "hook" in message
            assert "--moe-strategy none" in message
            assert "\n" not in message


def _hooked(rank: int, world_size: int) -> dict[str, tuple[int, float, str]]:
    """Passes that a hook has seen, the difference of a doubled output, and the refusal of a hook inside."""
    found = {}
    for name, grouped in (("one by one", False), ("grouped", True)):
        layer, seen = build(world_size, grouped=grouped), []
        hidden = draw(rank)
        layer(hidden)[0].sum().backward()  # The next pass has replicas.
        plain = layer(hidden)[0].detach()
        layer.experts.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        layer.experts.register_forward_hook(lambda module, rows, result: (result[0] * 2, result[1]))
        doubled = [layer(hidden)[0].detach() for _ in range(2)]
        difference = max(float((one - 2 * plain).abs().max()) for one in doubled)
        linears = layer.experts if grouped else layer.experts.local_experts[0]
        hook = ActivationLogger("")._make_activation_hook("", "") if grouped else print
        linears.linear_fc1.register_forward_hook(hook, with_kwargs=True)
        with pytest.raises(ConfigurationError) as refused:
            layer(hidden)
        found[name] = len(seen), difference, str(refused.value)
    return found


def test_wrapped_linear_layers_are_refused_in_one_line() -> None:
    for messages in run_megatron_ranks(_wrapped, 2, ep=2):
        assert len(messages) == 11
        for message in messages:
            assert any(one in message for one in ("LoRA", "meta device", "Megatron-FSDP"))
            assert "--moe-strategy none" in message
            assert "\n" not in message


class _Adapter(torch.nn.Module):
    """A linear layer beside a frozen one, as in LoRA."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base, self.down = base, torch.nn.Linear(HIDDEN, 2)

    def forward(self, *arguments: Any) -> Any:
        return self.base(*arguments)


class _Quantized(torch.nn.Module):
    """A class that replaces that of a module in its place, as ModelOpt's do."""


def _wrapped(rank: int, world_size: int) -> list[str]:
    messages = []
    for grouped, how in product(
        (False, True), ("wrapped", "adapter inside", "class", "whole expert", "weight", "FSDP")
    ):
        layer = build(world_size, grouped=grouped)
        layer(draw(rank))
        linears = layer.experts if grouped else layer.experts.local_experts[-1]
        if how == "wrapped":
            linears.linear_fc1 = _Adapter(linears.linear_fc1)
        elif how == "adapter inside":
            linears.linear_fc2.adapter = torch.nn.Linear(HIDDEN, 2)
        elif how == "weight":
            name = "weight0" if grouped else "weight"
            setattr(linears.linear_fc1, name, torch.nn.Parameter(getattr(linears.linear_fc1, name).detach()))
        elif how == "FSDP":
            next(layer.experts.parameters()).__fsdp_param__ = True
        elif how == "class":
            kind = type(linears.linear_fc2)
            linears.linear_fc2.__class__ = type("Quantized", (_Quantized, kind), {})
        elif not grouped:
            layer.experts.local_experts[0] = _Adapter(layer.experts.local_experts[0])
        else:
            continue
        with pytest.raises(ConfigurationError) as refused:
            layer(draw(rank))
        messages.append(str(refused.value))
    return messages


def test_adapters_from_before_the_join_are_refused_in_one_line() -> None:
    """Hosts add adapters before DDP wraps the model."""
    for messages in run_megatron_ranks(_built_with_adapters, 2, ep=2):
        for message in messages:
            assert "LoRA" in message
            assert "\n" not in message


def _built_with_adapters(rank: int, world_size: int) -> list[str]:
    from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer

    messages = []
    for grouped in (False, True):
        config = moe_config(world_size, HIDDEN, EXPERTS, moe_grouped_gemm=grouped)
        layer = build_layer(config, "fssdp", {}, stock=True)
        linears = layer.experts if grouped else layer.experts.local_experts[-1]
        linears.linear_fc1.adapter = torch.nn.Linear(HIDDEN, 2)
        with pytest.raises(ConfigurationError) as refused:
            StrategyMoELayer.of(layer, session_of("fssdp", {}))
        messages.append(str(refused.value))
    return messages
