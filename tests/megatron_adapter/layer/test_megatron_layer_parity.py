"""Megatron's MoE layer, built from the public spec functions, equals a reference without distributed logic.

Router, dispatcher and experts are Megatron's; the runtime alone is compared in more cases in
``tests/runtime/layers/test_slot_layer.py``.

The reference computes the global batch on one rank: for every token the sum over its
experts of probability times feed-forward network, with the weights of all experts.
"""

from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.activations import quick_gelu

from megatron_fssdp.runtime.slots.owner_gradients import gradient_of
from megatron_fssdp.testing.parallel_state import run_megatron_ranks

from ..grouped_linear import fake_grouped_experts
from .small_config import moe_config

TOKENS, HIDDEN, FFN, EXPERTS = 24, 16, 32, 8

# name: (TransformerConfig arguments, strategy, settings)
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "ep, gelu": ({}, "ep", {}),
    "fssdp, gelu, top-1": ({"moe_router_topk": 1, "moe_router_pre_softmax": True}, "fssdp", {"slots": 2}),
    "fssdp, swiglu, biases, 2 nodes": (
        {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True, "add_bias_linear": True},
        "fssdp",
        {"slots": 3, "nodes": 2},
    ),
    "fssdp, clamped gate with offset, top-4": (
        {
            "activation_func": quick_gelu,  # with SwiGLU, main refuses the two together
            "gated_linear_unit": True,
            "activation_func_clamp_value": 0.05,
            "glu_linear_offset": 1.0,
            "moe_router_topk": 4,
        },
        "fssdp",
        {"slots": 8},
    ),
    "fssdp, interleaving that experts one by one ignore": (
        {
            "activation_func": torch.nn.functional.silu,
            "gated_linear_unit": True,
            "moe_mlp_glu_interleave_size": 4,
        },
        "fssdp",
        {"slots": 2},
    ),
    "fssdp, probabilities on the input": (
        {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
        "fssdp",
        {"slots": 2},
    ),
    "grouped, ep, gelu": ({"moe_grouped_gemm": True}, "ep", {}),
    "grouped, fssdp, swiglu, biases, activations recomputed": (
        {
            "activation_func": torch.nn.functional.silu,
            "gated_linear_unit": True,
            "add_bias_linear": True,
            "bias_dropout_fusion": False,
            "moe_grouped_gemm": True,
            "recompute_granularity": "selective",
            "recompute_modules": ["moe_act"],
        },
        "fssdp",
        {"slots": 3, "nodes": 2},
    ),
    "grouped, fssdp, gradients added in the matrix product, biases": (
        {"add_bias_linear": True, "bias_dropout_fusion": False, "moe_grouped_gemm": True, "fuses": True},
        "fssdp",
        {"slots": 3, "nodes": 2},
    ),
    "grouped, fssdp, re-materialized, gradients added in the matrix product": (
        {"moe_grouped_gemm": True, "fuses": True},
        "fssdp",
        {"slots": 4, "rematerialize": True},
    ),
    "grouped, fssdp, probabilities on the input, re-materialized": (
        {
            "moe_router_topk": 1,
            "moe_router_pre_softmax": True,
            "moe_apply_probs_on_input": True,
            "moe_grouped_gemm": True,
        },
        "fssdp",
        {"slots": 4, "rematerialize": True},
    ),
}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_output_and_all_gradients_equal_the_reference(world_size: int) -> None:
    results = run_megatron_ranks(_compare_cases, world_size, ep=world_size)
    assert any("fssdp" in name for name in results[0])
    for name, (worst, num_replicas) in results[0].items():
        assert worst <= 1e-5, f"{name}: relative difference {worst}"
        assert (num_replicas > 0) == ("fssdp" in name), name


def _compare_cases(rank: int, world_size: int) -> dict[str, tuple[float, int]]:
    return {name: _compare(rank, world_size, *case) for name, case in CASES.items()}


def _compare(
    rank: int, world_size: int, options: dict[str, Any], strategy: str, settings: dict[str, Any]
) -> tuple[float, int]:
    import torch.distributed as dist

    import megatron_fssdp

    fuses = options.get("fuses", False)
    options = {name: value for name, value in options.items() if name != "fuses"}
    config = moe_config(
        world_size,
        HIDDEN,
        EXPERTS,
        ffn_hidden_size=FFN,
        moe_ffn_hidden_size=FFN,
        **{"moe_router_topk": 2, **options},
    )
    spec = megatron_fssdp.get_moe_module_spec(
        use_te=False, num_experts=EXPERTS, strategy=strategy, settings=settings
    )
    if config.moe_grouped_gemm:
        spec = partial(spec.func, **{**spec.keywords, "submodules": fake_grouped_experts(spec, fuses=fuses)})
    layer = spec(config=config, pg_collection=None)
    layer.set_layer_number(1)
    generator = torch.Generator().manual_seed(7)
    for parameters in layer.slot_layer.experts.parameters.values():
        for bias in parameters[2:]:  # they start at zero, which would hide mistakes
            torch.nn.init.normal_(bias, std=0.1)
    experts = [p for ps in layer.slot_layer.experts.parameters.values() for p in ps]
    for parameter in experts if fuses else ():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
        parameter.register_post_accumulate_grad_hook(_add_to_main_grad)
    worst, used, bind = 0.0, [], layer.slot_layer.on_pass
    layer.slot_layer.on_pass = lambda one: (used.append(one), bind(one))
    for _ in range(3):  # without a training loop, every backward pass is an iteration
        everyones = torch.randn(world_size, TOKENS, 1, HIDDEN, generator=generator)
        everyones[..., 0] += 2  # a common direction: some experts become hot
        upstream = torch.randn(world_size, TOKENS, 1, HIDDEN, generator=generator)
        mine = everyones[rank].clone().requires_grad_()
        layer.zero_grad()
        for parameter in experts if fuses else ():
            parameter.main_grad.zero_()
        output, _ = layer(mine)
        num_replicas = used[-1].plan.placement.num_replicas
        output.backward(upstream[rank])

        weights = _all_weights(layer, world_size)
        wanted, inputs, router = _reference(config, layer, weights, everyones, upstream)
        router_gradient = layer.router.weight.grad.clone()
        dist.all_reduce(router_gradient)
        pairs = [(output, wanted[rank]), (mine.grad, inputs.grad[rank]), (router_gradient, router.grad)]
        for expert, parameters in layer.slot_layer.experts.parameters.items():
            pairs += [(gradient_of(p), w.grad) for p, w in zip(parameters, weights[expert], strict=True)]
        worst = max(worst, *(_relative(got, want) for got, want in pairs))
    everyones_worst = torch.tensor(worst)
    dist.all_reduce(everyones_worst, op=dist.ReduceOp.MAX)
    return float(everyones_worst), num_replicas


def _add_to_main_grad(parameter: Any) -> None:
    """As Megatron's DDP."""
    if not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad, parameter.grad_added_to_main_grad = None, False


def _all_weights(layer: Any, world_size: int) -> dict[int, list[torch.Tensor]]:
    import torch.distributed as dist

    own = {e: [p.detach().clone() for p in ps] for e, ps in layer.slot_layer.experts.parameters.items()}
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, own)
    return {e: [w.requires_grad_() for w in ws] for found in everyones for e, ws in found.items()}


def _reference(
    config: Any,
    layer: Any,
    weights: dict[int, list[torch.Tensor]],
    everyones: torch.Tensor,
    upstream: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = everyones.clone().requires_grad_()
    router = layer.router.weight.detach().clone().requires_grad_()
    x = inputs.reshape(-1, HIDDEN)
    logits = x @ router.t() + (0 if layer.router.bias is None else layer.router.bias.detach())
    k = config.moe_router_topk
    if config.moe_router_pre_softmax:
        scores, chosen = logits.softmax(dim=-1).topk(k, dim=-1)
    else:
        scores, chosen = logits.topk(k, dim=-1)
        scores = scores.softmax(dim=-1)
    rows = []
    for token, (experts, probs) in enumerate(zip(chosen.tolist(), scores, strict=True)):
        terms = [_expert(config, weights[e], x[token], p) for e, p in zip(experts, probs, strict=True)]
        rows.append(torch.stack(terms).sum(dim=0))
    output = torch.stack(rows).view_as(inputs)
    output.backward(upstream)
    return output, inputs, router


def _expert(config: Any, tensors: list[torch.Tensor], x: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
    fc1, fc2, *biases = tensors
    if config.moe_apply_probs_on_input:
        x, prob = x * prob, torch.ones(())
    hidden = fc1 @ x + (biases[0] if biases else 0)
    if config.gated_linear_unit:
        gate, linear = hidden.chunk(2)
        if config.activation_func_clamp_value is not None:
            bound = config.activation_func_clamp_value
            gate, linear = gate.clamp(max=bound), linear.clamp(-bound, bound)
        hidden = config.activation_func(gate) * (linear + config.glu_linear_offset)
    else:
        hidden = config.activation_func(hidden)
    return prob * (fc2 @ hidden + (biases[1] if biases else 0))


def _relative(got: torch.Tensor, want: torch.Tensor | None) -> float:
    want = torch.zeros_like(got) if want is None else want.detach()  # an expert without tokens
    return float((got.detach() - want).norm() / want.norm().clamp_min(1e-3))
