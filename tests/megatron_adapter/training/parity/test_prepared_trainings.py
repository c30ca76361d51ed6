"""Trainings for which something of Megatron or of the plugin is replaced first have stock Megatron's losses.

The combined 1F1B schedule (``--overlap-moe-expert-parallel-comm``) runs parts of one micro-batch's forward
pass between parts of another one's backward pass. Grouped experts have linear layers with the interface of
Transformer Engine's. Jumping gates make other experts hot, whatever was planned for earlier loads. The
deduplicated exchange sends a token once to a node.
"""

import os
import random
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import get_args

from megatron_fssdp.collectives.sparse import sparse_transfer
from megatron_fssdp.strategies import layer_planning
from megatron_fssdp.strategies.fssdp import fssdp_strategy
from megatron_fssdp.strategies.fssdp.fssdp_strategy import FssdpStrategy

from ...grouped_linear import grouped_experts
from ...training_run import BATCH16, add_to_logits, assert_equal, slow, wrap
from .comparison import Layout, against_stock, layouts, trained
from .test_parity_matrix import LAYOUTS

COMBINED = layouts(
    """
    ep, one micro-batch | 2 2 | --global-batch-size 4 | ep
    copies, overlaps, bf16 | 4 2 | {BUCKETS} --bf16 {BATCH32} | {ADAPTIVE}
    shared expert, swiglu | 2 2 | {BATCH16} {SHARED} {GATED} | {ADAPTIVE}
    evaluation between iterations | 4 2 | {BUCKETS} {BATCH32} {EVALUATES} | {ADAPTIVE}
    transfers in turn with the exchange | 2 2 | {BATCH16} | {ADAPTIVE} overlap=false
    re-materialized, three layers, overlaps | 4 2 | {BUCKETS} {BATCH32} --num-layers 3 | {ADAPTIVE}
        rematerialize=true
    calibrated | 2 2 | {BATCH16} | {ADAPTIVE} planner=hecate FSSDP_PROFILE_ITERATIONS=1
    experts in tensor-parallel parts | 4 2 | {TP2} {NO_BIAS} {BUCKETS} {BATCH16} | {ADAPTIVE}
    whole experts under tensor parallelism | 4 2 | {TP2} {NO_BIAS} {WHOLE_EXPERTS} {BATCH16} | {ADAPTIVE}
    interleaved pipeline, re-materialized | 4 2 | {INTERLEAVED} {BATCH16} {BUCKETS} | {ADAPTIVE}
        rematerialize=true
    dense layers between | 2 2 | {BATCH16} --num-layers 4 --moe-layer-freq ([0,1]*2) | {ADAPTIVE}
    multi-token prediction | 2 2 | {BATCH16} --mtp-num-layers 1 --position-embedding-type rope | {ADAPTIVE}
    attention recomputed | 2 2 | {BATCH16} --recompute-granularity selective --recompute-modules core_attn
        | {ADAPTIVE}
    one expert on a device | 4 4 | --num-experts 4 {BATCH32} | fssdp slots=1 overlap_degree=2
    prophet, split transfers | 2 2 | {BATCH16} --num-layers 3 | prophet
    fastermoe, smart schedule | 2 2 | {BATCH16} | fastermoe smart_schedule=true
    deduplicated exchange | 4 2 | {BUCKETS} --bf16 {BATCH32} | {ADAPTIVE} exchange=deduplicated
    deduplicated exchange, re-materialized | 4 4 | {BATCH32} --moe-router-topk 4 | {ADAPTIVE}
        rematerialize=true nodes=2 exchange=deduplicated
    quota | 2 2 | {BATCH16} | quota
    smartmoe | 2 2 | {BATCH16} | smartmoe
    flexmoe | 2 2 | {BATCH16} | flexmoe
    auto | 2 2 | {BATCH16} | auto
    parm, baseline | 4 2 | {TP2} {NO_BIAS} {BATCH16} | parm schedule=baseline
    parm, s1 | 4 2 | {TP2} {NO_BIAS} {BATCH16} | parm schedule=s1
    parm, s2 | 4 2 | {TP2} {NO_BIAS} {BATCH16} | parm schedule=s2
    """
)

GROUPED = layouts(
    """
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

JUMPING = layouts(
    """
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


# Layouts of the matrix whose features meet the deduplicated exchange of rows.
DEDUPLICATED = (
    *("copies_overlaps_bf16", "experts_in_tensor_parallel_parts", "interleaved_pipeline_overlaps"),
    *("recomputed_moe_expert_bias_calibrated", "biases_on_declared_nodes", "copies_top4_hecate"),
    *("ep8_bf16_distributed", "ep8_top1_dropping_hecate", "ep4_of_8_overlaps_recomputed"),
    *("tp2_expert_tp1_distributed_expert_bias", "tp2_expert_tp2_copies_distributed"),
    *("pipeline_recomputed_rematerialized", "recomputed_aux_loss_shared_expert", "padded_to_capacity"),
)
BY_PRICE = ("copies_top4_hecate", "experts_in_tensor_parallel_parts", "pipeline_recomputed_rematerialized")
PRICED = "exchange=by_price FSSDP_PROFILE_ITERATIONS=2 FSSDP_CHECK_PLANS=1"


def allow_fp32():
    """Let Megatron's check accept fp32, in which the losses of two runs can be compared exactly."""

    def as_if_in_half_precision(check, self):
        is_fp32 = self.overlap_moe_expert_parallel_comm and not (self.bf16 or self.fp16)
        self.bf16 = self.bf16 or is_fp32
        check(self)
        self.bf16 = self.bf16 and not is_fp32

    wrap(TransformerConfig, "__post_init__", as_if_in_half_precision)


def build_grouped_experts(*, fuses):
    # With --moe-grouped-gemm, Megatron asks whether the GPU can run Transformer Engine's kernels.
    torch.cuda.get_device_capability = lambda device=None: (8, 0)
    LocalSpecProvider.grouped_mlp_modules = lambda self, moe_use_grouped_gemm: grouped_experts(fuses=fuses)


def skew_gates():
    """Two experts are hot, and others after every two iterations."""
    add_to_logits(
        lambda logits: [2 * (get_args().curr_iteration // 2) % logits.shape[-1] + i for i in (0, 1)], 4.0
    )


def at_any_price():
    """Between CPU ranks the exchange would hardly ever pay, so it is used here whatever it costs."""
    layer_planning.LEAST_GAIN = -1e9


def combined(layout):
    return replace(layout, arguments=f"--overlap-moe-expert-parallel-comm {layout.arguments}")


def of_matrix(names, more):
    def changed(layout):
        settings = f"fssdp {layout.settings} reshard_interval={layout.reshard_interval} {more}"
        return replace(layout, settings=settings, num_iterations=20)

    return {name: changed(LAYOUTS[name]) for name in names}


SHORT = Layout(2, 2, BATCH16, "fssdp slots=2 overlap_degree=3 reshard_interval=1", num_iterations=3)


def cases(kind, of_kind, before, bound=1e-5):
    """Layouts, what is called first, and the bound of losses in fp32."""
    return {f"{kind}, {name}": (layout, before, bound) for name, layout in of_kind.items()}


CASES = {"combined schedule": (combined(SHORT), allow_fp32, 3e-5)}
CASES |= cases("combined", {name: combined(layout) for name, layout in COMBINED.items()}, allow_fp32, 3e-5)
for fuses in (False, True):
    CASES |= cases(f"grouped experts, {fuses=}", GROUPED, partial(build_grouped_experts, fuses=fuses))
CASES |= cases("jumping gates", JUMPING, skew_gates)
CASES |= cases("deduplicated", of_matrix(DEDUPLICATED, "exchange=deduplicated"), None)
CASES |= cases("exchange by price", of_matrix(BY_PRICE, PRICED), at_any_price)


@pytest.mark.parametrize("name", [*list(CASES)[:1], *slow(list(CASES)[1:])])
def test_losses_equal_stock_megatron(name, text_data, tmp_path):
    layout, before, bound = CASES[name]
    moves = name == "combined schedule" or (name.startswith("deduplicated") and layout.moves)
    against_stock(layout, text_data, tmp_path, bound=bound, before=before, moves=moves)


def one_copy_jumps():
    """Let the loads of the second copy jump, and set prices at which the first copy alone would move experts.

    New owners save a second in an iteration and layer. The move takes five, and three iterations and two
    layers save six; soon after a jump, they are expected to save less than five.
    """

    def hot(logits):
        jumps = parallel_state.get_expert_data_parallel_rank() == 1 and get_args().curr_iteration >= 1
        return [1, 2] if jumps else [0, 1]

    add_to_logits(hot, 20.0)
    FssdpStrategy._seconds = lambda self, context, owner_E, load_E: float(len(set(owner_E[:2])) == 1)
    FssdpStrategy.overlap_degree = lambda self, context: 0
    fssdp_strategy.moving_seconds = lambda old_E, new_E, *others: 5.0 * bool((old_E != new_E).any())


def test_a_jump_in_one_copy_counts_for_all(text_data, tmp_path):
    """Expert-parallel groups with copies of the same experts see other tokens, and must decide alike."""
    settings = "fssdp FSSDP_PROFILE_ITERATIONS=1 slots=0 reshard_interval=3 FSSDP_CHECK_PLANS=1"
    # Later decisions, when the loads have settled again, move experts.
    layout = Layout(4, 2, "", settings, replicates=False, num_iterations=7)
    against_stock(layout, text_data, tmp_path, before=one_copy_jumps, moves=True)


REPEATED = layouts(
    """
    rematerialized_balanced_bf16 | 4 4 | --bf16 {DISTRIBUTED} | {LATE} rematerialize=true SHARES=exact
        | num_iterations=3
    several_micro_batches | 4 4 | {BATCH16} | {LATE}
    """,
    LATE="fssdp slots=2 overlap_degree=4 nodes=2 reshard_interval=2",
)


@pytest.mark.parametrize("name", [*list(REPEATED)[:1], *slow(list(REPEATED)[1:])])
def test_a_repeated_run_has_bitwise_equal_losses(name, text_data):
    """The same seed and layout give equal losses, in whichever order transfers arrive."""
    layout = REPEATED[name]
    first = trained(layout, layout.settings, text_data)
    assert_equal(trained(layout, layout.settings, text_data, before=let_messages_be_late), first)


def let_messages_be_late():
    """Delay some steps of each rank's transfers, by different times on each rank."""
    draw = random.Random(int(os.environ["RANK"]))

    def start_late(start, *arguments, **how):
        if draw.random() < 0.3:
            time.sleep(draw.random() * 0.01)
        return start(*arguments, **how)

    wrap(sparse_transfer, "start_exchange", start_late)
