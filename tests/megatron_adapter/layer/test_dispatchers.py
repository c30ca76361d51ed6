"""With every dispatcher of Megatron, a layer with replicas equals the stock layer."""

import os
from functools import partial
from typing import Any

import pytest
import torch

from megatron_fssdp.runtime.slots.owner_gradients import gradient_of
from megatron_fssdp.testing.parallel_state import run_megatron_ranks

from ..fused_dispatch import install_fused_dispatch
from ..grouped_linear import fake_grouped_experts
from .small_config import moe_config

TOKENS, HIDDEN, EXPERTS = 32, 16, 8
CAPACITY = {"moe_expert_capacity_factor": 1.0}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}

# name: (arguments of the config, settings that are changed afterwards because a CPU lacks what they need)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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


@pytest.mark.parametrize("cp", [1, 2])
def test_output_and_all_gradients_equal_the_stock_layer(cp: int) -> None:
    for found in run_megatron_ranks(_compare_all, 4, ep=4, cp=cp):
        for name, (worst, num_replicas) in found.items():
            assert worst <= 1e-5, f"{name}: relative difference {worst}"
            # Experts that are padded to the capacity have equal loads.
            assert (num_replicas > 0) != ("to the capacity" in name), name


def _compare_all(rank: int, world_size: int) -> dict[str, tuple[float, int]]:
    from megatron.core.transformer.moe import moe_layer, token_dispatcher

    install_fused_dispatch()
    os.environ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] = "2"  # 2 + 3 slots become 6.
    token_dispatcher.get_align_size_for_quantization = lambda config: 4
    moe_layer.HAVE_TE, moe_layer.TELinear = True, _Projection
    return {name: _compare(rank, world_size, *case) for name, case in CASES.items()}


def _compare(rank: int, world_size: int, options: dict[str, Any], later: dict[str, Any]) -> tuple[float, int]:
    config = moe_config(world_size, HIDDEN, EXPERTS, moe_router_topk=2, **options)
    for name, value in later.items():
        setattr(config, name, value)
    stock, ours = (_layer(config, strategy) for strategy in ("none", "fssdp"))
    worst = 0.0
    for step in range(3):  # Without a training loop, every backward pass is an iteration.
        generator = torch.Generator().manual_seed(10 * step + rank)
        hidden, upstream = torch.randn(2, TOKENS, 1, HIDDEN, generator=generator)
        hidden[..., 0] += 2  # a common direction: some experts become hot
        (wanted, of_experts), (got, experts) = (_pass(layer, hidden, upstream) for layer in (stock, ours))
        wanted += [of_experts[name] for name in sorted(of_experts)]
        got += [experts[name] for name in sorted(of_experts)]
        worst = max(worst, *(_relative(x, y) for x, y in zip(got, wanted, strict=True)))
    return worst, ours.slot_layer.plan_iteration().placement.num_replicas


def _layer(config: Any, strategy: str) -> Any:
    import megatron_fssdp
    from megatron_fssdp.megatron_adapter.layer.moe_layer import MoELayer

    spec = megatron_fssdp.get_moe_module_spec(
        use_te=False,
        num_experts=EXPERTS,
        strategy="fssdp",
        settings={"slots": 3, "overlap_degree": 4, "reshard_interval": 0},
    )
    if config.moe_grouped_gemm:
        spec = partial(spec.func, **{**spec.keywords, "submodules": fake_grouped_experts(spec)})
    if strategy == "none":
        spec = partial(MoELayer, submodules=spec.keywords["submodules"])
    torch.manual_seed(3)
    layer = spec(config=config, pg_collection=None)
    layer.set_layer_number(1)
    return layer


def _pass(
    layer: Any, hidden: torch.Tensor, upstream: torch.Tensor
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Output, gradients of the input and of the router, and those of the experts."""
    layer.zero_grad()
    mine = hidden.clone().requires_grad_()
    output, _ = layer(mine)
    output.backward(upstream)
    if layer.config.overlap_dispatch_backward_with_experts_wgrad and hasattr(layer, "slot_layer"):
        layer.slot_layer.finish_gradients()
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
