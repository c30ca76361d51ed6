"""A layer of a strategy equals Megatron's own: output and all gradients, with every dispatcher of Megatron.

``test_parm_layer.py`` compares with a reference without distributed logic, and the runtime alone is compared
in more cases in ``tests/runtime/layers/test_slot_layer.py``.
"""

import os
from typing import Any

import pytest
import torch
from megatron.core.activations import quick_gelu

from megatron_fssdp.runtime.slots.replica_transfers import gradient_of
from megatron_fssdp.testing.parallel_state import run_megatron_ranks

from ..fused_dispatch import install_fused_dispatch
from .small_config import build_layer, moe_config

TOKENS, HIDDEN, EXPERTS, SEED = 32, 16, 8, 5
CAPACITY = {"moe_expert_capacity_factor": 1.0}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}
REPLICAS = {"slots": 2, "overlap_degree": 4, "reshard_interval": 0}

# name: (arguments of the config, settings that are changed afterwards because a CPU lacks what they need)
DISPATCHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alltoall": ({}, {}),
    "allgather": ({"moe_token_dispatcher_type": "allgather"}, {}),
    "DeepEP": (FLEX, {}),
    "DeepEP, dropping tokens": ({**FLEX, **CAPACITY}, {}),
    "DeepEP, padded for quantization": (FLEX, {"moe_router_padding_for_quantization": True}),
    "HybridEP": ({**FLEX, "moe_flex_dispatcher_backend": "hybridep"}, {}),
    "HybridEP, padded to the capacity": ({**FLEX, **PADDED, "moe_flex_dispatcher_backend": "hybridep"}, {}),
    "padded for quantization": ({}, {"moe_router_padding_for_quantization": True}),
    "delayed weight gradients": (
        {"moe_grouped_gemm": True},
        {"overlap_dispatch_backward_with_experts_wgrad": True},
    ),
    "latent": ({"moe_latent_size": 8}, {}),
}

SWIGLU = {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
BIASES = {"add_bias_linear": True, "bias_dropout_fusion": False}
ON_INPUT = {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True}
GROUPED = {"moe_grouped_gemm": True}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
CLAMPED = {
    "activation_func": quick_gelu,  # with SwiGLU, main refuses the two together
    "gated_linear_unit": True,
    "activation_func_clamp_value": 0.05,
    "glu_linear_offset": 1.0,
}

# name: (arguments of the config, strategy, settings)
EXPERT_MODULES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "ep, gelu": ({}, "ep", {}),
    "top-1": ({"moe_router_topk": 1, "moe_router_pre_softmax": True}, "fssdp", {"slots": 2}),
    "swiglu, biases, 2 nodes": ({**SWIGLU, "add_bias_linear": True}, "fssdp", {"slots": 3, "nodes": 2}),
    "clamped gate with offset, top-4": ({**CLAMPED, "moe_router_topk": 4}, "fssdp", {"slots": 8}),
    "interleaving that experts one by one ignore": (
        {**SWIGLU, "moe_mlp_glu_interleave_size": 4},
        "fssdp",
        REPLICAS,
    ),
    "probabilities on the input": (ON_INPUT, "fssdp", {"slots": 2}),
    "grouped, ep, gelu": (GROUPED, "ep", {}),
    "grouped, swiglu, biases, activations recomputed": (
        {**SWIGLU, **BIASES, **GROUPED, **RECOMPUTED},
        "fssdp",
        {"slots": 3, "nodes": 2},
    ),
    "grouped, fused gradients, biases": ({**BIASES, **GROUPED}, "fssdp", {"slots": 3, "nodes": 2}),
    "grouped, re-materialized, fused gradients": (GROUPED, "fssdp", {"slots": 4, "rematerialize": True}),
    "grouped, probabilities on the input, re-materialized": (
        {**ON_INPUT, **GROUPED},
        "fssdp",
        {"slots": 4, "rematerialize": True},
    ),
}


@pytest.mark.parametrize("cp", [1, 2])
def test_output_and_all_gradients_with_every_dispatcher(cp: int) -> None:
    _check(run_megatron_ranks(_compare_dispatchers, 4, ep=4, cp=cp))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_output_and_all_gradients_with_every_kind_of_experts(world_size: int) -> None:
    _check(run_megatron_ranks(_compare_experts, world_size, ep=world_size))


def _check(results: list[dict[str, tuple[float, int]]]) -> None:
    for found in results:
        for name, (worst, num_replicas) in found.items():
            assert worst <= 1e-5, f"{name}: relative difference {worst}"
            # Experts that are padded to the capacity have equal loads.
            assert (num_replicas > 0) != ("to the capacity" in name or "ep, " in name), name


def _compare_dispatchers(rank: int, world_size: int) -> dict[str, tuple[float, int]]:
    from megatron.core.transformer.moe import moe_layer, token_dispatcher

    install_fused_dispatch()
    os.environ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] = "2"  # 2 + 3 slots become 6.
    token_dispatcher.get_align_size_for_quantization = lambda config: 4
    moe_layer.HAVE_TE, moe_layer.TELinear = True, _Projection
    return {
        name: _compare(rank, world_size, options, "fssdp", {**REPLICAS, "slots": 3}, later)
        for name, (options, later) in DISPATCHERS.items()
    }


def _compare_experts(rank: int, world_size: int) -> dict[str, tuple[float, int]]:
    return {
        name: _compare(rank, world_size, *case, {}, fuses="fused" in name)
        for name, case in EXPERT_MODULES.items()
    }


def _compare(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    strategy: str,
    settings: dict[str, Any],
    later: dict[str, Any],
    *,
    fuses: bool = False,
) -> tuple[float, int]:
    config = moe_config(world_size, HIDDEN, EXPERTS, **{"moe_router_topk": 2, **options})
    for name, value in later.items():
        setattr(config, name, value)
    stock, ours = (_layer(config, strategy, settings, fuses, is_stock) for is_stock in (True, False))
    worst, used, bind = 0.0, [], ours.slot_layer.on_pass
    ours.slot_layer.on_pass = lambda one: (used.append(one), bind(one))
    for step in range(3):  # Without a training loop, every backward pass is an iteration.
        generator = torch.Generator().manual_seed(10 * step + rank)
        hidden, upstream = torch.randn(2, TOKENS, 1, HIDDEN, generator=generator)
        hidden[..., 0] += 2  # a common direction: some experts become hot
        (wanted, of_experts), (got, experts) = (_pass(layer, hidden, upstream) for layer in (stock, ours))
        wanted += [of_experts[name] for name in sorted(of_experts)]
        got += [experts[name] for name in sorted(of_experts)]
        worst = max(worst, *(_relative(x, y) for x, y in zip(got, wanted, strict=True)))
    return worst, used[-1].plan.placement.num_replicas


def _layer(config: Any, strategy: str, settings: dict[str, Any], fuses: bool, stock: bool) -> Any:
    torch.manual_seed(SEED)
    layer = build_layer(config, strategy, settings, fuses=fuses, stock=stock)
    for name, parameter in layer.experts.named_parameters():
        if "bias" in name:  # They start at zero, which would hide mistakes.
            torch.nn.init.normal_(parameter, std=0.1)
        if fuses:
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
            parameter.register_post_accumulate_grad_hook(_add_to_main_grad)
    return layer


def _add_to_main_grad(parameter: Any) -> None:
    """As Megatron's DDP."""
    if not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad, parameter.grad_added_to_main_grad = None, False


def _pass(
    layer: Any, hidden: torch.Tensor, upstream: torch.Tensor
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Output, gradients of the input and of the router, and those of the experts."""
    layer.zero_grad()
    for parameter in layer.experts.parameters():
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.zero_()
    mine = hidden.clone().requires_grad_()
    output, _ = layer(mine)
    output.backward(upstream)
    if layer.config.overlap_dispatch_backward_with_experts_wgrad and hasattr(layer, "slot_layer"):
        layer.slot_layer.gradients.finish()
    experts = {name: gradient_of(p) for name, p in layer.experts.named_parameters()}
    of_experts = {name: torch.zeros(1) if one is None else one.clone() for name, one in experts.items()}
    return [output.detach(), mine.grad, layer.router.weight.grad.clone()], of_experts


class _Projection(torch.nn.Linear):
    """In the place of Transformer Engine's linear layer."""

    def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp_min(1e-3))
