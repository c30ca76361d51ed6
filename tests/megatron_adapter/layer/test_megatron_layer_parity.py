"""A layer of a strategy equals Megatron's own, with every dispatcher of Megatron and of the plugin."""

import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from megatron.core import parallel_state as ps
from megatron.core.activations import quick_gelu
from megatron.core.transformer.moe import moe_layer, token_dispatcher

from megatron_fssdp.config.strategy.strategy_registry import register_strategy
from megatron_fssdp.planning.cost import tensor_schedules
from megatron_fssdp.strategies.ep import EpSettings
from megatron_fssdp.strategies.fssdp import FssdpSettings
from megatron_fssdp.strategies.fssdp.fssdp_strategy import FssdpStrategy
from tests.support.training_preload import run_megatron_ranks

from ..fused_dispatch import install_fused_dispatch
from ..training_run import slow
from .compared_layers import REPLICAS, Row, compare_rows

CAPACITY = {"moe_expert_capacity_factor": 1.0}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
NO_DROPS = {"moe_expert_capacity_factor": 8.0}
FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}
SWIGLU = {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
BIASES = {"add_bias_linear": True, "bias_dropout_fusion": False}
TOP1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
TOP4 = {"moe_router_topk": 4}
ON_INPUT = {**TOP1, "moe_apply_probs_on_input": True}
GROUPED = {"moe_grouped_gemm": True}
GATED = {**SWIGLU, **GROUPED}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
WHOLE_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
SHARED = {"moe_shared_expert_intermediate_size": 12}
OVERLAPPED = {**SHARED, "moe_shared_expert_overlap": True}
SHARED_RECOMPUTED = {**OVERLAPPED, **WHOLE_RECOMPUTED}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
CLAMPED = {"activation_func": quick_gelu, "gated_linear_unit": True, "activation_func_clamp_value": 0.05}
CLAMPED |= {"glu_linear_offset": 1.0}  # with SwiGLU, main refuses it beside the clamp
HYBRID = {**FLEX, "moe_flex_dispatcher_backend": "hybridep"}
LATE = {"slots": 4, "rematerialize": True}
NOT_REPLICATED = {"replicates": False}
QUANTIZED = {"moe_router_padding_for_quantization": True}


def with_norms(kind):
    """A layer with more in its steps, as Gemma 4's of Megatron-Bridge and mcore-bridge."""

    def norm(x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:])

    class Normed(kind):
        def route(self, hidden_states, *rest):
            probs, routing_map = super().route(norm(hidden_states) + 1, *rest)
            return probs * torch.linspace(0.5, 1, probs.shape[1]), routing_map

        def preprocess(self, hidden_states, *rest):
            return super().preprocess(norm(hidden_states), *rest)

        def postprocess(self, *rest):
            return norm(super().postprocess(*rest))

    return Normed


DISPATCHERS = {
    "alltoall": Row({}),
    "allgather": Row({"moe_token_dispatcher_type": "allgather"}),
    "DeepEP": Row(FLEX),
    "DeepEP, dropping tokens": Row({**FLEX, **CAPACITY}),
    "DeepEP, padded for quantization": Row(FLEX, later=QUANTIZED),
    "HybridEP": Row(HYBRID),
    "HybridEP, padded to the capacity": Row({**HYBRID, **PADDED}, replicates=False),
    "padded for quantization": Row({}, later=QUANTIZED),
    "delayed weight gradients": Row(GROUPED, later={"overlap_dispatch_backward_with_experts_wgrad": True}),
    "with steps of a host": Row({}, kind=with_norms),
    "latent": Row({"moe_latent_size": 8}),
}
EXPERT_MODULES = {
    "gelu": Row({}, "ep", {}, replicates=False),
    "top-1": Row(TOP1, settings={"slots": 2}),
    "swiglu, biases, 2 nodes": Row({**SWIGLU, "add_bias_linear": True}, settings={"slots": 3, "nodes": 2}),
    "clamped gate with offset, top-4": Row({**CLAMPED, **TOP4}, settings={"slots": 8}),
    "interleaving that experts one by one ignore": Row({**SWIGLU, "moe_mlp_glu_interleave_size": 4}),
    "probabilities on the input": Row(ON_INPUT, settings={"slots": 2}),
    "grouped, gelu": Row(GROUPED, "ep", {}, replicates=False),
    "grouped, swiglu, biases, activations recomputed": Row({**SWIGLU, **BIASES, **GROUPED, **RECOMPUTED}),
    "grouped, fused gradients, biases": Row({**BIASES, **GROUPED}, fuses=True),
    "adapters of Megatron-Bridge": Row(SWIGLU, adapters="bridge"),
    "adapters of mcore-bridge, biases, re-materialized": Row(BIASES, settings=LATE, adapters="mcore_bridge"),
    "grouped, one adapter of Megatron-Bridge": Row(GATED, adapters="bridge"),
    "grouped, adapters of mcore-bridge, fused": Row(GATED, adapters="mcore_bridge", fuses=True),
    "grouped, re-materialized, fused gradients": Row(GROUPED, settings=LATE, fuses=True),
    "grouped, probabilities on the input, re-materialized": Row({**ON_INPUT, **GROUPED}, settings=LATE),
}
UNEVEN_TOKENS = {"tokens": (5, 9, 1, 12), "silent": (1, 2), "replicates": False}
ONCE = {**REPLICAS, "exchange": "deduplicated"}


def once(*nodes, more=None, **options):
    """A layer that sends each token once to each of these nodes."""
    return Row(options, settings=ONCE, nodes=nodes, **more or {})


def in_steps(group_size, more=None, **options):
    """A layer with the smart schedule over groups of ranks."""
    settings = {**REPLICAS, "smart_schedule": True, "group_size": group_size}
    return Row(options, "scheduled", settings, nodes=(0, 0, 1, 1), **more or {})


SEGMENTS = {"in_segments": True}
EXCHANGES = {
    "once, 1 node, capacity, top-4": once(0, 0, 0, 0, **CAPACITY, **TOP4),
    "once, 4 nodes, segments, top-4": once(0, 1, 2, 3, **TOP4, more=SEGMENTS),
    "once, uneven nodes, shared experts overlap, recomputed": once(0, 1, 1, 1, **SHARED_RECOMPUTED),
    "once, nodes that alternate, top-1": once(0, 1, 0, 1, **TOP1),
    "once, all experts": once(0, 0, 1, 1, moe_router_topk=8, more=NOT_REPLICATED),
    "once, one expert on a device": once(0, 0, 1, 1, num_moe_experts=4),
    "once, ranks without rows": once(0, 0, 1, 1, **NO_DROPS, more=UNEVEN_TOKENS),
    "once, nobody has rows": once(0, 0, 1, 1, **NO_DROPS, more={**NOT_REPLICATED, "silent": (0, 1, 2, 3)}),
    "once, padded to the capacity": once(0, 0, 1, 1, **PADDED, more=NOT_REPLICATED),
    "once, bf16, top-4": once(0, 0, 1, 1, **BF16, **TOP4),
    "groups of 2, top-1, shared experts overlap, recomputed": in_steps(2, **TOP1, **SHARED_RECOMPUTED),
    "one group, capacity": in_steps(4, **CAPACITY),
    "groups of 1, grouped, activations recomputed, ranks without rows": in_steps(
        1, **GROUPED, **RECOMPUTED, **NO_DROPS, more=UNEVEN_TOKENS
    ),
    "groups of 1, padded to the capacity": in_steps(1, **PADDED, more=NOT_REPLICATED),
    "groups of 2, segments, top-4": in_steps(2, **TOP4, more=SEGMENTS),
    "groups of 2, bf16": in_steps(2, **BF16),
    "groups of 2, one adapter of Megatron-Bridge": in_steps(2, **GROUPED, more={"adapters": "bridge"}),
    "once, one adapter of Megatron-Bridge": once(0, 0, 1, 1, **GROUPED, more={"adapters": "bridge"}),
}


def parm(schedule, split=False, strategy="parm", **options):
    """A layer in fp64 whose tensor-parallel ranks have the same tokens unless they are split."""
    settings = {"schedule": schedule, **({"slots": 2} if strategy == "scheduled" else {})}
    return Row(options, strategy, settings, split=split)


IN_STEPS = {"smart_schedule": True, "group_size": 1}
TENSOR_PARALLEL = {
    "baseline, shared expert overlaps": parm("baseline", **OVERLAPPED),
    "baseline, split, top-1": parm("baseline", True, **TOP1),
    "megatron, split, shared expert overlaps": parm("megatron", True, **OVERLAPPED),
    "s1, dropping, swiglu": parm("s1", **CAPACITY, **SWIGLU),
    "s1, split, padded to the capacity, recomputed": parm("s1", True, **PADDED, **WHOLE_RECOMPUTED),
    "s1 under ep, shared expert": parm("s1", False, "ep", **SHARED),
    "s2, shared expert, recomputed": parm("s2", **SHARED, **WHOLE_RECOMPUTED),
    "s2, shared expert overlaps": parm("s2", **OVERLAPPED),
    "s2, split, swiglu": parm("s2", True, **SWIGLU),
    "s2, dropping, as under baseline": parm("s2", **CAPACITY),
    "s2, results at once": replace(parm("s2"), in_slices=False),
    "auto": parm("auto"),
    "auto, split": parm("auto", True),
    "s1, replicas, shared expert overlaps": parm("s1", False, "scheduled", **OVERLAPPED),
    "s1, split, replicas": parm("s1", True, "scheduled"),
    "megatron, replicas, dropping": parm("megatron", False, "scheduled", **CAPACITY),
    "replicas, recomputed": Row(WHOLE_RECOMPUTED, split=False),
    "once, 2 nodes, dropping, top-4": Row({**CAPACITY, **TOP4}, settings={**ONCE, "nodes": 2}),
    "once, shared expert overlaps": once(**OVERLAPPED),
    "once, segments, top-4": once(**TOP4, more=SEGMENTS),
    "whole experts with biases, s2, swiglu": parm("s2", **BIASES, **SWIGLU),
    "whole experts in steps, split, shared expert overlaps": Row(OVERLAPPED, "ep", IN_STEPS),
}
LOSSES = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
IN_FP64 = {"params_dtype": torch.float64, "moe_router_dtype": "fp64", "moe_router_pre_softmax": True}
IN_FP64 |= {**LOSSES, "num_attention_heads": 4}
# (tensor parallel, expert tensor parallel, expert parallel)
PARTS, WHOLE = (2, 2, 2), (4, 1, 2)
LAYOUTS = [PARTS, WHOLE, (2, 1, 2), (1, 2, 2), (4, 2, 2), (2, 4, 1), (2, 2, 4), (2, 1, 1)]


@pytest.mark.parametrize("ep", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_output_and_all_gradients_with_every_dispatcher(ep, cp):
    _check(run_megatron_ranks(_compare, ep, "DISPATCHERS", ep=ep, cp=cp), DISPATCHERS)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_output_and_all_gradients_with_every_kind_of_experts(world_size):
    results = run_megatron_ranks(_compare, world_size, "EXPERT_MODULES", ep=world_size)
    _check(results, EXPERT_MODULES)


def test_output_and_all_gradients_with_the_exchanges_of_the_plugin():
    results = run_megatron_ranks(_compare, 4, "EXCHANGES", ep=4)
    _check(results, EXCHANGES)
    for name in EXCHANGES:
        of_ranks = [by_name[name] for by_name in results]
        wanted = "Deduplicated" if name.startswith("once") else "SmartSchedule"
        assert {rank.dispatcher for rank in of_ranks} == {f"{wanted}TokenDispatcher"}, name
        # A token goes once to each other node, and once to each device.
        assert all(rank.sent[0] == rank.distinct[0] for rank in of_ranks), name
        assert sum(rank.sent[1] for rank in of_ranks) == sum(rank.distinct[1] for rank in of_ranks), name


@pytest.mark.parametrize("layout", slow(LAYOUTS), ids=str)
def test_output_and_all_gradients_under_tensor_parallelism(layout):
    check_tensor_parallel(layout, list(TENSOR_PARALLEL))


def test_output_and_all_gradients_in_parts_and_with_whole_experts():
    """Half of the rows in each of two layouts; the last rows are of whole experts."""
    names = list(TENSOR_PARALLEL)
    check_tensor_parallel(PARTS, names[:-2:2])
    check_tensor_parallel(WHOLE, [*names[1:-2:2], *names[-2:]])


def check_tensor_parallel(layout, names):
    tp, etp, ep = layout
    results = run_megatron_ranks(_compare_tensor_parallel, max(tp, etp * ep), names, tp=tp, etp=etp, ep=ep)
    assert len(results[0]) > 5
    _check(results, {name: replace(row, replicates=False) for name, row in TENSOR_PARALLEL.items()}, 1e-10)


def _check(results, table, tolerance=1e-05):
    for of_rank in results:
        for name, comparison in of_rank.items():
            bound = 2e-2 if "bf16" in table[name].options else tolerance
            assert comparison.error <= bound, f"{name}: relative difference {comparison.error}"
            assert comparison.num_replicas > 0 or not table[name].replicates, name


def _compare(rank, world_size, table):
    _register_scheduled()
    install_fused_dispatch()
    os.environ["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] = "2"  # 2 + 3 slots become 6.
    token_dispatcher.get_align_size_for_quantization = lambda config: 4
    moe_layer.HAVE_TE, moe_layer.TELinear = True, _Projection
    return compare_rows(rank, globals()[table])


def _compare_tensor_parallel(rank, world_size, names):
    _register_scheduled()
    is_whole = ps.get_expert_tensor_parallel_world_size() == 1
    is_single = ps.get_tensor_model_parallel_world_size() == 1
    comparisons = {}
    for name, row in ((name, TENSOR_PARALLEL[name]) for name in names):
        # The others are refused. On one device, Megatron's own experts with biases and its segments fail.
        if ("whole experts" in name and not is_whole) or (row.split and is_single):
            continue
        if ("biases" in name or row.in_segments) and ps.get_expert_model_parallel_world_size() == 1:
            continue
        # Such small layers would not be cut into slices otherwise.
        least = {"LEAST_SLICE_BYTES": 0} if row.in_slices else {}
        # Megatron's scores are fp32, whose rounding would hide other differences.
        exact = patch("torch.softmax", lambda x, dim, dtype=None: x.softmax(dim=dim))
        with exact, patch.dict(vars(tensor_schedules), least):
            comparisons |= compare_rows(rank, {name: replace(row, options={**IN_FP64, **row.options})})
    return comparisons


def _register_scheduled():
    settings = type("ScheduledSettings", (FssdpSettings, EpSettings), {})
    register_strategy(
        "scheduled", settings=settings, strategy=FssdpStrategy, summary="replicas and a schedule"
    )


class _Projection(torch.nn.Linear):
    """In the place of Transformer Engine's linear layer."""

    def __init__(self, inputs, outputs, **_):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x):
        return super().forward(x), None
