"""A layer of a strategy equals Megatron's own: output and all gradients, with every dispatcher of Megatron.

Where tensor-parallel ranks have the same tokens, the reference is Megatron's layer under sequence
parallelism, which gets a part of the tokens on each rank. ``tests/runtime/layers/test_slot_layer.py``
compares the runtime alone with a reference without distributed logic.
"""

import os
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from megatron.core.activations import quick_gelu

from megatron_fssdp.config.strategy.shipped_settings import EpSettings, FssdpSettings
from megatron_fssdp.runtime.slots.replica_transfers import gradient_of
from megatron_fssdp.strategies.fssdp import FssdpStrategy
from megatron_fssdp.testing.parallel_state import run_megatron_ranks

from ..fused_dispatch import install_fused_dispatch
from .small_config import build_layer, moe_config

TOKENS, HIDDEN, EXPERTS, SEED = 32, 16, 8, 5
CAPACITY = {"moe_expert_capacity_factor": 1.0}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}
REPLICAS = {"slots": 2, "overlap_degree": 4, "reshard_interval": 0}
SWIGLU = {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
BIASES = {"add_bias_linear": True, "bias_dropout_fusion": False}
TOP1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
ON_INPUT = {**TOP1, "moe_apply_probs_on_input": True}
GROUPED = {"moe_grouped_gemm": True}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
WHOLE_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
SHARED = {"moe_shared_expert_intermediate_size": 12}
OVERLAPPED = {**SHARED, "moe_shared_expert_overlap": True}
CLAMPED = {
    "activation_func": quick_gelu,  # with SwiGLU, main refuses the two together
    "gated_linear_unit": True,
    "activation_func_clamp_value": 0.05,
    "glu_linear_offset": 1.0,
}


class Row(NamedTuple):
    """One layer: arguments of its config, and its strategy."""

    options: dict[str, Any]
    strategy: str = "fssdp"
    settings: dict[str, Any] = {**REPLICAS, "slots": 3}  # noqa: RUF012  # never changed
    later: dict[str, Any] = {}  # noqa: RUF012  # settings of the config that a CPU lacks something for
    fuses: bool = False  # whether gradients are added to main_grad by the experts themselves
    split: bool = True  # whether tensor-parallel ranks have different tokens


DISPATCHERS = {
    "alltoall": Row({}),
    "allgather": Row({"moe_token_dispatcher_type": "allgather"}),
    "DeepEP": Row(FLEX),
    "DeepEP, dropping tokens": Row({**FLEX, **CAPACITY}),
    "DeepEP, padded for quantization": Row(FLEX, later={"moe_router_padding_for_quantization": True}),
    "HybridEP": Row({**FLEX, "moe_flex_dispatcher_backend": "hybridep"}),
    "HybridEP, padded to the capacity": Row({**FLEX, **PADDED, "moe_flex_dispatcher_backend": "hybridep"}),
    "padded for quantization": Row({}, later={"moe_router_padding_for_quantization": True}),
    "delayed weight gradients": Row(GROUPED, later={"overlap_dispatch_backward_with_experts_wgrad": True}),
    "latent": Row({"moe_latent_size": 8}),
}
EXPERT_MODULES = {
    "gelu": Row({}, "ep", {}),
    "top-1": Row(TOP1, "fssdp", {"slots": 2}),
    "swiglu, biases, 2 nodes": Row({**SWIGLU, "add_bias_linear": True}, "fssdp", {"slots": 3, "nodes": 2}),
    "clamped gate with offset, top-4": Row({**CLAMPED, "moe_router_topk": 4}, "fssdp", {"slots": 8}),
    "interleaving that experts one by one ignore": Row({**SWIGLU, "moe_mlp_glu_interleave_size": 4}),
    "probabilities on the input": Row(ON_INPUT, "fssdp", {"slots": 2}),
    "grouped, gelu": Row(GROUPED, "ep", {}),
    "grouped, swiglu, biases, activations recomputed": Row(
        {**SWIGLU, **BIASES, **GROUPED, **RECOMPUTED}, "fssdp", {"slots": 3, "nodes": 2}
    ),
    "grouped, fused gradients, biases": Row(
        {**BIASES, **GROUPED}, "fssdp", {"slots": 3, "nodes": 2}, fuses=True
    ),
    "grouped, re-materialized, fused gradients": Row(
        GROUPED, "fssdp", {"slots": 4, "rematerialize": True}, fuses=True
    ),
    "grouped, probabilities on the input, re-materialized": Row(
        {**ON_INPUT, **GROUPED}, "fssdp", {"slots": 4, "rematerialize": True}
    ),
}


def parm(schedule: str, split: bool = False, strategy: str = "parm", **options: Any) -> Row:
    """A layer in fp64 whose tensor-parallel ranks have the same tokens unless they are split."""
    settings = {"schedule": schedule, **({"slots": 2} if strategy == "scheduled" else {})}
    return Row(options, strategy, settings, split=split)


IN_STEPS = {"smart_schedule": True, "group_size": 1}
TENSOR_PARALLEL = {
    "baseline, shared expert overlaps": parm("baseline", **OVERLAPPED),
    "baseline, split, top-1": parm("baseline", True, **TOP1),
    "megatron, dropping": parm("megatron", **CAPACITY),
    "megatron, split, shared expert overlaps": parm("megatron", True, **OVERLAPPED),
    "s1, dropping, swiglu": parm("s1", **CAPACITY, **SWIGLU),
    "s1, split, recomputed": parm("s1", True, **WHOLE_RECOMPUTED),
    "s1, split, padded to the capacity, recomputed": parm("s1", True, **PADDED, **WHOLE_RECOMPUTED),
    "s1 under ep, shared expert": parm("s1", False, "ep", **SHARED),
    "s2, shared expert, recomputed": parm("s2", **SHARED, **WHOLE_RECOMPUTED),
    "s2, shared expert overlaps": parm("s2", **OVERLAPPED),
    "s2, split, swiglu": parm("s2", True, **SWIGLU),
    "s2, dropping, as under baseline": parm("s2", **CAPACITY),
    "auto": parm("auto"),
    "auto, split": parm("auto", True),
    "s1, replicas, shared expert overlaps": parm("s1", False, "scheduled", **OVERLAPPED),
    "s1, split, replicas": parm("s1", True, "scheduled"),
    "replicas, recomputed": Row(WHOLE_RECOMPUTED, split=False),
    "whole experts with biases, s2, swiglu": parm("s2", **BIASES, **SWIGLU),
    "whole experts in steps, split, shared expert overlaps": Row(OVERLAPPED, "ep", IN_STEPS),
}
IN_FP64 = {
    "params_dtype": torch.float64,
    "moe_router_dtype": "fp64",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_router_pre_softmax": True,
    "num_attention_heads": 4,
}
# (tensor parallel, expert tensor parallel, expert parallel)
LAYOUTS = [(2, 2, 2), (2, 1, 2), (4, 1, 2), (1, 2, 2), (4, 2, 2), (2, 4, 1), (2, 2, 4), (2, 1, 1)]


@pytest.mark.parametrize("cp", [1, 2])
def test_output_and_all_gradients_with_every_dispatcher(cp: int) -> None:
    _check(run_megatron_ranks(_compare_dispatchers, 4, ep=4, cp=cp), DISPATCHERS, 1e-5)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_output_and_all_gradients_with_every_kind_of_experts(world_size: int) -> None:
    _check(run_megatron_ranks(_compare_experts, world_size, ep=world_size), EXPERT_MODULES, 1e-5)


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS[:1], *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS[1:])],
    ids=str,
)
def test_output_and_all_gradients_under_tensor_parallelism(layout: tuple[int, int, int]) -> None:
    tp, etp, ep = layout
    results = run_megatron_ranks(_compare_tensor_parallel, max(tp, etp * ep), tp=tp, etp=etp, ep=ep)
    assert len(results[0]) > 5
    _check(results, TENSOR_PARALLEL, 1e-10)


def _check(results: list[dict[str, tuple[float, int]]], table: dict[str, Row], tolerance: float) -> None:
    for found in results:
        for name, (worst, num_replicas) in found.items():
            assert worst <= tolerance, f"{name}: relative difference {worst}"
            # Experts that are padded to the capacity have equal loads.
            can_replicate = table[name].strategy in ("fssdp", "scheduled") and "to the capacity" not in name
            assert num_replicas == 0 or can_replicate, name
            assert num_replicas > 0 or not can_replicate or table is TENSOR_PARALLEL, name
    assert any(num_replicas for _, num_replicas in results[0].values()) or "alltoall" not in results[0]


def _compare_dispatchers(rank: int, world_size: int) -> dict[str, tuple[float, int]]:
    from megatron.core.transformer.moe import moe_layer, token_dispatcher

    install_fused_dispatch()
    os.environ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] = "2"  # 2 + 3 slots become 6.
    token_dispatcher.get_align_size_for_quantization = lambda config: 4
    moe_layer.HAVE_TE, moe_layer.TELinear = True, _Projection
    return {name: _compare(rank, row) for name, row in DISPATCHERS.items()}


def _compare_experts(rank: int, world_size: int) -> dict[str, tuple[float, int]]:
    return {name: _compare(rank, row) for name, row in EXPERT_MODULES.items()}


def _compare_tensor_parallel(rank: int, world_size: int) -> dict[str, tuple[float, int]]:
    from megatron.core import parallel_state as ps

    from megatron_fssdp.config.strategy.strategy_registry import register_strategy

    settings = type("ScheduledSettings", (FssdpSettings, EpSettings), {})
    register_strategy(
        "scheduled", settings=settings, strategy=FssdpStrategy, summary="replicas and a schedule"
    )
    is_whole = ps.get_expert_tensor_parallel_world_size() == 1
    is_one = ps.get_tensor_model_parallel_world_size() == 1
    cases = {
        name: row
        for name, row in TENSOR_PARALLEL.items()
        # The others are refused; Megatron's own experts with biases fail on one device.
        if not ("whole experts" in name and not is_whole) and not (row.split and is_one)
        if not ("biases" in name and ps.get_expert_model_parallel_world_size() == 1)
    }
    # Megatron's scores are fp32, whose rounding would hide other differences. Such small layers would not be
    # cut into slices otherwise.
    in_fp64 = patch("torch.softmax", lambda x, dim, dtype=None: x.softmax(dim=dim))
    least = patch("megatron_fssdp.planning.cost.tensor_schedules.LEAST_SLICE_BYTES", 0)
    with in_fp64, least:
        return {
            name: _compare(rank, row._replace(options={**IN_FP64, **row.options}))
            for name, row in cases.items()
        }


def _compare(rank: int, row: Row) -> tuple[float, int]:
    from megatron.core import parallel_state as ps
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0, dtype=row.options.get("params_dtype")))
    group, tp = ps.get_tensor_model_parallel_group(), ps.get_tensor_model_parallel_world_size()
    has_same = not row.split and tp > 1
    sees_all = "moe_expert_capacity_factor" in row.options and row.settings.get("schedule") == "s2"
    ours = _layer(row, row.split and tp > 1)
    if sees_all:  # Each rank drops among all tokens, which Megatron cannot do.
        stock = _layer(row._replace(settings={"schedule": "baseline"}), False)
    else:
        stock = _layer(row, tp > 1, is_stock=True)
    ours.load_state_dict(stock.state_dict())
    worst, used, bind = 0.0, [], ours.slot_layer.on_pass
    ours.slot_layer.on_pass = lambda one: (used.append(one), bind(one))
    for step in range(3):  # Without a training loop, every backward pass is an iteration.
        seed = ps.get_data_parallel_rank() if has_same else rank
        generator = torch.Generator().manual_seed(10 * step + seed)
        hidden, upstream = torch.randn(2, TOKENS, 1, HIDDEN, generator=generator)
        hidden, upstream = (x.to(ours.config.params_dtype) for x in (hidden, upstream))
        hidden[..., 0] += 2  # a common direction: some experts become hot
        has_parts = has_same and not sees_all
        own = [x.chunk(tp)[group.rank()] if has_parts else x for x in (hidden, upstream)]
        wanted, of_experts = _pass(stock, *own)
        got, experts = _pass(ours, hidden, upstream)
        if has_parts:  # The parts of output and input are those of the sequence; the router's are summands.
            parts = [[torch.empty_like(x) for _ in range(tp)] for x in wanted]
            for part, x in zip(parts, wanted, strict=True):
                torch.distributed.all_gather(part, x.contiguous(), group=group)
            wanted = [torch.cat(parts[0]), torch.cat(parts[1]), sum(parts[2], torch.zeros(()))]
        wanted += [of_experts[name] for name in sorted(of_experts)]
        got += [experts[name] for name in sorted(of_experts)]
        worst = max(worst, *(_relative(x, y) for x, y in zip(got, wanted, strict=True)))
    return worst, used[-1].plan.placement.num_replicas


def _layer(row: Row, is_split: bool, *, is_stock: bool = False) -> Any:
    from megatron.core import parallel_state as ps

    sizes = {
        "tensor_model_parallel_size": ps.get_tensor_model_parallel_world_size(),
        "expert_tensor_parallel_size": ps.get_expert_tensor_parallel_world_size(),
        "sequence_parallel": is_split,
    }
    ep = ps.get_expert_model_parallel_world_size()
    config = moe_config(ep, HIDDEN, EXPERTS, **{"moe_router_topk": 2, **sizes, **row.options})
    for name, value in row.later.items():
        setattr(config, name, value)
    torch.manual_seed(SEED)
    layer = build_layer(config, row.strategy, row.settings, fuses=row.fuses, stock=is_stock)
    # Megatron starts with equal experts on all ranks, and with biases of zero, which would hide mistakes.
    torch.manual_seed(100 * ps.get_expert_model_parallel_rank() + ps.get_expert_tensor_parallel_rank())
    for parameter in layer.experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        if row.fuses:
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
    """Output, gradients of the input and of the router, and those of the experts over their copies."""
    from megatron.core import parallel_state as ps

    layer.zero_grad()
    for parameter in layer.experts.parameters():
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.zero_()
    mine = hidden.clone().requires_grad_()
    output, _ = layer(mine)
    output.backward(upstream)
    if layer.config.overlap_dispatch_backward_with_experts_wgrad and hasattr(layer, "slot_layer"):
        layer.slot_layer.gradients.finish()
    experts = {name: (p, gradient_of(p)) for name, p in layer.experts.named_parameters()}
    sums = {name: torch.zeros_like(p) if one is None else one.clone() for name, (p, one) in experts.items()}
    if getattr(layer, "shared_experts", None) is not None:
        sums["shared"] = layer.shared_experts.linear_fc2.weight.grad.clone()
    for name in sorted(sums):
        torch.distributed.all_reduce(sums[name], group=ps.get_expert_data_parallel_group())
    return [output.detach(), mine.grad, layer.router.weight.grad.clone()], sums


class _Projection(torch.nn.Linear):
    """In the place of Transformer Engine's linear layer."""

    def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp_min(1e-3))
