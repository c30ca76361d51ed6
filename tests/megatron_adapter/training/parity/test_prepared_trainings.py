"""Trainings for which something of Megatron or of the plugin is replaced first have stock Megatron's losses.

The combined 1F1B schedule (``--overlap-moe-expert-parallel-comm``) runs parts of one micro-batch's forward
pass between parts of another one's backward pass. Grouped experts have linear layers with the interface of
Transformer Engine's. Jumping gates make other experts hot, whatever was planned for earlier loads.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training import get_args

from megatron_fssdp.strategies import fssdp, layer_planning
from megatron_fssdp.strategies.fssdp import FssdpStrategy

from ...grouped_linear import grouped_experts
from ...training_run import BATCH16, DROPPING, NO_BIAS, wrap
from .comparison import ADAPTIVE, Layout, against_stock, layouts, replicas_of
from .test_parity_matrix import DEFAULT, MORE, compare

COMBINED = layouts(
    """
    ep, one micro-batch | 2 2 | --global-batch-size 4 | ep
    copies, overlaps, bf16 | 4 2 | {BUCKETS} --bf16 {BATCH32} | {ADAPTIVE}
    shared expert, swiglu | 2 2 | {BATCH16} {SHARED} {GATED} | {ADAPTIVE}
    evaluation between iterations | 4 2 | {BUCKETS} {BATCH32} {EVALUATES} | {ADAPTIVE}
    transfers in turn with the exchange | 2 2 | {BATCH16} | {ADAPTIVE} overlap=false
    re-materialized | 2 2 | {BATCH16} --num-layers 3 | {ADAPTIVE} rematerialize=true
    re-materialized, three layers, overlaps | 4 2 | {BUCKETS} {BATCH32} --num-layers 3 | {ADAPTIVE}
        rematerialize=true
    calibrated | 2 2 | {BATCH16} | {ADAPTIVE} planner=hecate FSSDP_PROFILE_ITERATIONS=1
    experts in tensor-parallel parts | 4 2 | {TP2} {NO_BIAS} {BUCKETS} {BATCH16} | {ADAPTIVE}
    whole experts under tensor parallelism | 4 2 | {TP2} {NO_BIAS} {WHOLE_EXPERTS} {BATCH16} | {ADAPTIVE}
    interleaved pipeline | 4 2 | {INTERLEAVED} {BATCH16} {BUCKETS} | {ADAPTIVE}
    interleaved pipeline, re-materialized | 4 2 | {INTERLEAVED} {BATCH16} {BUCKETS} | {ADAPTIVE}
        rematerialize=true
    dense layers between | 2 2 | {BATCH16} --num-layers 4 --moe-layer-freq ([0,1]*2) | {ADAPTIVE}
    multi-token prediction | 2 2 | {BATCH16} --mtp-num-layers 1 --position-embedding-type rope | {ADAPTIVE}
    attention recomputed | 2 2 | {BATCH16} --recompute-granularity selective --recompute-modules core_attn
        | {ADAPTIVE}
    one expert on a device | 4 4 | --num-experts 4 {BATCH32} | fssdp slots=1 overlap_degree=2
    prophet, split transfers | 2 2 | {BATCH16} --num-layers 3 | prophet
    fastermoe | 2 2 | {BATCH16} | fastermoe
    fastermoe, smart schedule | 2 2 | {BATCH16} | fastermoe smart_schedule=true
    deduplicated exchange | 4 2 | {BUCKETS} --bf16 {BATCH32} | {ADAPTIVE} exchange=deduplicated
    deduplicated exchange, re-materialized | 4 4 | {BATCH32} --moe-router-topk 4 | {ADAPTIVE}
        rematerialize=true nodes=2 exchange=deduplicated
    quota | 2 2 | {BATCH16} | quota
    smartmoe | 2 2 | {BATCH16} | smartmoe
    flexmoe | 2 2 | {BATCH16} | flexmoe
    auto | 2 2 | {BATCH16} | auto
    parm, baseline | 4 2 | {TP2} {NO_BIAS} {BATCH16} | parm schedule=baseline
    parm, megatron | 4 2 | {TP2} {NO_BIAS} {BATCH16} | parm schedule=megatron
    parm, s1 | 4 2 | {TP2} {NO_BIAS} {BATCH16} | parm schedule=s1
    parm, s2 | 4 2 | {TP2} {NO_BIAS} {BATCH16} | parm schedule=s2
    """
)

GROUPED = layouts(
    """
    several micro-batches | 4 2 | {BATCH16} | {WIDE}
    distributed optimizer, re-sharded | 4 2 | {BATCH16} {OVERLAPS} | {WIDE} reshard_interval=2
    re-materialized | 4 2 | {BATCH16} | {WIDE} rematerialize=true
    recomputed | 4 2 | {BATCH16} {RECOMPUTE} | {WIDE}
    smart schedule | 4 2 | {BATCH16} | fastermoe slots=2 smart_schedule=true
    resident replicas | 4 2 | {BATCH16} | flexmoe
    pipeline | 4 2 | {BATCH16} {PP2} | {WIDE}
    bf16 | 4 2 | {BATCH16} --bf16 | fastermoe
    """,
    WIDE="fssdp slots=2 overlap_degree=4",
)

PERIOD = 2
"""Iterations after which other experts become hot."""
JUMPING = layouts(
    """
    one_node | 4 4 | {OVERLAPS} | {EXACT} | num_iterations=8
    nodes_micro_batches | 4 4 | {BATCH16} | {EXACT} nodes=2 reshard_interval=2 | num_iterations=8
    pipeline_recomputed | 4 2 | {PP2} {RECOMPUTE} {BATCH16} | {EXACT} | num_iterations=8
    interleaved_rematerialized | 4 2 | {INTERLEAVED} {GATED} {BATCH16} | {EXACT} rematerialize=true
        | num_iterations=8
    calibrated | 4 4 | {BATCH16} | fssdp slots=2 nodes=2 planner=hecate FSSDP_PROFILE_ITERATIONS=1
        FSSDP_CHECK_PLANS=1 | num_iterations=8
    in_steps | 4 4 | | fastermoe slots=2 FSSDP_PROFILE_ITERATIONS=1 FSSDP_CHECK_PLANS=1 nodes=2
        smart_schedule=true | num_iterations=8
    deduplicated | 4 4 | | {CHECKED} nodes=2 exchange=deduplicated | num_iterations=8
    quota | 4 4 | {BATCH16} | quota slots=2 FSSDP_PROFILE_ITERATIONS=1 FSSDP_CHECK_PLANS=1 | num_iterations=8
    """,
    CHECKED="fssdp slots=2 overlap_degree=3 FSSDP_CHECK_PLANS=1",
    EXACT="fssdp slots=2 overlap_degree=3 FSSDP_CHECK_PLANS=1 SHARES=exact",
)


def combined(layout: Layout) -> Layout:
    return replace(layout, arguments=f"--overlap-moe-expert-parallel-comm {layout.arguments}")


def allow_fp32() -> None:
    """Let Megatron's check accept fp32, in which the losses of two runs can be compared exactly."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    def as_if_in_half_precision(check: Any, self: Any) -> None:
        is_fp32 = self.overlap_moe_expert_parallel_comm and not (self.bf16 or self.fp16)
        self.bf16 = self.bf16 or is_fp32
        check(self)
        self.bf16 = self.bf16 and not is_fp32

    wrap(TransformerConfig, "__post_init__", as_if_in_half_precision)


def test_the_combined_schedule_has_stock_megatrons_losses(text_data: Path, tmp_path: Path) -> None:
    layout = combined(Layout(2, 2, BATCH16, ADAPTIVE))
    run, metrics = against_stock(layout, text_data, tmp_path, bound=3e-5, before=allow_fp32)
    assert any(replicas_of(metrics))
    assert any("re-sharded" in message for message in run.messages)


@pytest.mark.slow
@pytest.mark.parametrize("case", COMBINED)
def test_the_combined_schedule_has_stock_megatrons_losses_in_more_cases(
    case: str, text_data: Path, tmp_path: Path
) -> None:
    layout = combined(COMBINED[case])
    before = None if layout.is_half else allow_fp32
    _, metrics = against_stock(layout, text_data, tmp_path, bound=3e-5, before=before)
    assert any(replicas_of(metrics)) or "fssdp" not in layout.settings


@pytest.mark.slow
@pytest.mark.parametrize("fuses", [False, True], ids=["separate gradients", "fused gradients"])
@pytest.mark.parametrize("case", GROUPED)
def test_grouped_experts_have_stock_megatrons_losses(
    case: str, fuses: bool, text_data: Path, tmp_path: Path
) -> None:
    against_stock(GROUPED[case], text_data, tmp_path, before=partial(build_grouped_experts, fuses=fuses))


def build_grouped_experts(*, fuses: bool) -> None:
    from megatron.core.models.backends import LocalSpecProvider

    # With --moe-grouped-gemm, Megatron asks whether the GPU can run Transformer Engine's kernels.
    torch.cuda.get_device_capability = lambda device=None: (8, 0)
    LocalSpecProvider.grouped_mlp_modules = lambda self, moe_use_grouped_gemm: grouped_experts(fuses=fuses)


def add_to_logits(hot: Callable[[torch.Tensor], list[int]], bias: float) -> None:
    """Make experts hot: those that a function of the logits names."""

    def skewed(gating: Any, router: TopKRouter, hidden: torch.Tensor) -> torch.Tensor:
        logits = gating(router, hidden)
        extra = torch.zeros_like(logits)
        extra[..., hot(logits)] = bias
        return logits + extra

    wrap(TopKRouter, "gating", skewed)


def skew_gates() -> None:
    """Run on every rank before the launch: two experts are hot, and others after some iterations."""

    def hot(logits: torch.Tensor) -> list[int]:
        first = 2 * (get_args().curr_iteration // PERIOD) % logits.shape[-1]
        return [first, first + 1]

    add_to_logits(hot, 4.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", JUMPING)
def test_jumping_gates_have_stock_megatrons_losses(name: str, text_data: Path, tmp_path: Path) -> None:
    _, metrics = against_stock(JUMPING[name], text_data, tmp_path, before=skew_gates)
    assert any(replicas_of(metrics))


def one_copy_jumps() -> None:
    """Let the loads of the second copy jump, and set prices at which the first copy alone would move experts.

    New owners save a second in an iteration and layer. The move takes five, and three iterations and two
    layers save six; soon after a jump, they are expected to save less than five.
    """

    def hot(logits: torch.Tensor) -> list[int]:
        jumps = parallel_state.get_expert_data_parallel_rank() == 1 and get_args().curr_iteration >= 1
        return [1, 2] if jumps else [0, 1]

    add_to_logits(hot, 20.0)
    replaced: Any = FssdpStrategy
    replaced._seconds = lambda self, context, owner_E, load_E: float(len(set(owner_E[:2])) == 1)
    replaced.overlap_degree = lambda self, context: 0
    moved: Any = fssdp
    moved.exchange_s = lambda old_E, new_E, *others: 5.0 * bool((old_E != new_E).any())


def test_a_jump_in_one_copy_counts_for_all(text_data: Path, tmp_path: Path) -> None:
    """Expert-parallel groups with copies of the same experts see other tokens, and must decide alike."""
    settings = "fssdp FSSDP_PROFILE_ITERATIONS=1 slots=0 reshard_interval=3 FSSDP_CHECK_PLANS=1"
    layout = Layout(4, 2, BATCH16, settings, num_iterations=8)
    run, _ = against_stock(layout, text_data, tmp_path, before=one_copy_jumps)
    # Later decisions, when the loads have settled again, move experts.
    assert any("re-sharded" in message for message in run.messages)


# Layouts of the matrix whose features meet the deduplicated exchange of rows.
DEDUPLICATED = (
    *("copies_overlaps_bf16", "experts_in_tensor_parallel_parts", "interleaved_pipeline_overlaps"),
    *("recomputed_moe_expert_bias_calibrated", "biases_on_declared_nodes", "copies_top4_hecate"),
    *("ep8_bf16_distributed", "ep8_top1_dropping_hecate", "ep4_of_8_overlaps_recomputed"),
    *("tp2_expert_tp1_distributed_expert_bias", "tp2_expert_tp2_copies_distributed"),
    *("pipeline_recomputed_rematerialized", "recomputed_aux_loss_shared_expert", "padded_to_capacity"),
)


@pytest.mark.slow
def test_groups_of_one_device_drop_tokens_as_stock_megatron(text_data: Path, tmp_path: Path) -> None:
    """They have nothing to deduplicate, also where capacity leaves tokens without an expert."""
    arguments = f"--expert-tensor-parallel-size 2 --moe-router-topk 2 {DROPPING} {NO_BIAS}"
    layout = Layout(2, 1, arguments, "exchange=deduplicated", moves=False, replicates=False)
    compare(layout, text_data, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEDUPLICATED)
def test_the_deduplicated_exchange_has_stock_megatrons_losses(
    name: str, text_data: Path, tmp_path: Path
) -> None:
    layout = (DEFAULT | MORE)[name]
    settings = f"{layout.settings} exchange=deduplicated"
    compare(replace(layout, settings=settings, num_iterations=20), text_data, tmp_path)


def at_any_price() -> None:
    """Between CPU ranks the exchange would hardly ever pay, so it is used here whatever it costs."""
    layer_planning.LEAST_GAIN = -1e9


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["copies_top4_hecate", "experts_in_tensor_parallel_parts", "pipeline_recomputed_rematerialized"]
)
def test_losses_do_not_change_with_the_exchange(name: str, text_data: Path, tmp_path: Path) -> None:
    """Tokens are sent as pairs until costs are measured, and once from then on."""
    layout = (DEFAULT | MORE)[name]
    settings = f"fssdp {layout.settings} exchange=by_price FSSDP_PROFILE_ITERATIONS=2 FSSDP_CHECK_PLANS=1"
    layout = replace(layout, settings=settings, num_iterations=20)
    run, _ = against_stock(layout, text_data, tmp_path, before=at_any_price)
    told = [text for text in run.messages if "exchange by price" in text]
    assert told
    assert all("exchange by price, iteration 3: layers" in text for text in told)
