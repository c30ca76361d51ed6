"""Complete trainings in many parallel layouts: losses equal stock Megatron's.

The matrix is data. A layout combines several of Megatron's features with several of the strategy's
settings, so that most pairs of them meet somewhere; owners move every other iteration.
"""

from dataclasses import replace

import pytest

from ...training_run import BATCH16, BATCH32, GPT, assert_close, assert_equal, train
from .comparison import against_stock, layouts, trained

LAYOUTS = layouts(
    """
    copies_overlaps_bf16 | 4 2 | {OVERLAPS} --bf16 {BATCH32} --ddp-num-buckets 4 | slots=2 overlap_degree=3
    interleaved_pipeline_overlaps | 4 2 | {INTERLEAVED} {OVERLAPS} {GATED} | slots=2 overlap_degree=2
        rematerialize=true
    experts_in_tensor_parallel_parts | 4 2 | {TP2} {OVERLAPS} {GATED} {RECOMPUTE} | slots=2 overlap_degree=3
        nodes=2 FSSDP_CHECK_PLANS=1 SHARES=exact
    recomputed_moe_expert_bias_calibrated | 2 2 | {RECOMPUTE_MOE} {EXPERT_BIAS} {BATCH16} | slots=1
        overlap_degree=2 planner=hecate FSSDP_PROFILE_ITERATIONS=1
    biases_on_declared_nodes | 4 4 | {BATCH32} | slots=2 overlap_degree=2 nodes=2 FSSDP_CHECK_PLANS=1
        SHARES=exact
    top1_16_experts_4_micro_batches | 2 2 | {TOP1} --swiglu --num-experts 16 {BATCH16} {NO_BIAS} | slots=3
        overlap_degree=4 rematerialize=true
    copies_top4_hecate | 4 2 | --moe-router-topk 4 {DISTRIBUTED} {BATCH32} | slots=2 overlap_degree=4
        planner=hecate FSSDP_CHECK_PLANS=1 SHARES=exact
    copies_overlaps_eval | 4 2 | {OVERLAPS} {GATED} --ddp-num-buckets 4 {EVALUATES} | slots=2 overlap_degree=2
        planner=hecate FSSDP_PROFILE_ITERATIONS=1
    copies_overlaps_eval_rematerialized | 4 2 | {OVERLAPS} {SHARED} {NO_BIAS} {EVALUATES} --clip-grad 0 |
        slots=2 overlap_degree=2 rematerialize=true overlap=false
    ep8_bf16_distributed | 8 8 | --num-experts 16 --bf16 --grad-reduce-in-bf16 {DISTRIBUTED} {BATCH32} {GATED}
        | slots=2 overlap_degree=4 nodes=2 FSSDP_CHECK_PLANS=1 SHARES=exact
    ep8_top1_dropping_hecate | 8 8 | {TOP1} {DROPPING} {BATCH16} {AUX_LOSS} | slots=1 overlap_degree=3 nodes=4
        planner=hecate
    ep4_of_8_overlaps_recomputed | 8 4 | {OVERLAPS} {RECOMPUTE} --global-batch-size 64 | slots=2
        overlap_degree=3 nodes=2 rematerialize=true SHARES=exact FSSDP_PEER_PUTS=1
    ep1_overlaps | 2 1 | {OVERLAPS} {NO_BIAS} {BATCH16} | slots=2 | moves=0 replicates=0
    ep1_tp2_expert_tp1_overlaps_recomputed | 2 1 | {TP2} {WHOLE_EXPERTS} {OVERLAPS} {NO_BIAS} {RECOMPUTE_MOE}
        |  | moves=0 replicates=0
    tp2_expert_tp1_distributed_expert_bias | 4 4 | {TP2} {WHOLE_EXPERTS} {DISTRIBUTED} {EXPERT_BIAS}
        --moe-router-topk 4 {NO_BIAS} | slots=2 overlap_degree=3 nodes=2
    tp2_expert_tp1_copies_overlaps_aux_loss | 4 2 | {TP2} {WHOLE_EXPERTS} {OVERLAPS} {AUX_LOSS} {SHARED}
        {NO_BIAS} | slots=2 overlap_degree=2 planner=hecate FSSDP_PROFILE_ITERATIONS=2
    tp1_expert_tp2_dropping_gelu | 4 2 | --expert-tensor-parallel-size 2 {NO_BIAS} {DROPPING} {SHARED}
        --clip-grad 0 | slots=2 overlap_degree=2 overlap=false nodes=2
    tp2_expert_tp2_copies_distributed | 8 2 | {TP2} {DISTRIBUTED} {GATED} {BATCH16} | slots=2 overlap_degree=3
        rematerialize=true FSSDP_CHECK_PLANS=1
    pipeline_shared_expert_4_micro_batches | 4 2 | {PP2} {SHARED} {NO_BIAS} {BATCH16} --num-layers 4 | slots=2
        overlap_degree=2 planner=hecate nodes=2 FSSDP_CHECK_PLANS=1
    pipeline_recomputed_rematerialized | 4 2 | {PP2} --num-layers 4 {RECOMPUTE} {BATCH16} {GATED}
        {DISTRIBUTED} | slots=3 overlap_degree=2 rematerialize=true planner=hecate FSSDP_PROFILE_ITERATIONS=1
    interleaved_pipeline_expert_bias_not_aligned | 4 2 | {INTERLEAVED} {OVERLAPS} {EXPERT_BIAS} {BATCH16}
        --no-align-grad-reduce --no-align-param-gather | slots=2 overlap_degree=2 planner=hecate
        FSSDP_PROFILE_ITERATIONS=1
    pipeline_dense_first_stage | 4 2 | {PP2} --moe-layer-freq ([0]+[1]) {OVERLAPS} | slots=2 overlap_degree=2
        nodes=2
    recomputed_aux_loss_shared_expert | 4 4 | {RECOMPUTE} {AUX_LOSS} {SHARED} {NO_BIAS}
        --calculate-per-token-loss {BATCH32} | slots=2 overlap_degree=3 rematerialize=true
    shared_expert_overlap_gate_copies_overlaps | 4 2 | {OVERLAPS} {SHARED_OVERLAP} --moe-shared-expert-gate
        --swiglu {BATCH32} | slots=2 overlap_degree=2 planner=hecate FSSDP_PROFILE_ITERATIONS=1
    shared_expert_overlap_tp2_pipeline_recomputed_moe | 8 2 | {PP2} {TP2} {DISTRIBUTED} {SHARED_OVERLAP}
        --moe-shared-expert-gate {RECOMPUTE_MOE} {BATCH16} | slots=2 overlap_degree=2 rematerialize=true
    dropping_recomputed_moe | 4 4 | {DROPPING} {RECOMPUTE_MOE} {DISTRIBUTED} | slots=2 overlap_degree=2
        overlap=false nodes=2
    padded_to_capacity | 4 4 | {DROPPING} --moe-pad-expert-input-to-capacity {NO_BIAS} --swiglu | slots=2
        overlap_degree=2 | moves=0 replicates=0
    copies_per_token_loss | 4 2 | --calculate-per-token-loss {OVERLAPS} --moe-router-topk 4 --clip-grad 0
        {BATCH32} | slots=2 overlap_degree=2 FSSDP_CHECK_PLANS=1
    moe_every_other_layer_after_dense_ones | 2 2 | --num-layers 4 --moe-layer-freq ([0]*1+[1]+[0]+[1])
        {DISTRIBUTED} --clip-grad 0 | slots=2 overlap_degree=2 planner=hecate FSSDP_PROFILE_ITERATIONS=1
    measured_limits | 4 4 | {GATED} {BATCH32} | FSSDP_PROFILE_ITERATIONS=1 | moves=0
    measured_limits_copies_rematerialized | 4 2 | {OVERLAPS} {SHARED} {NO_BIAS} --calculate-per-token-loss |
        FSSDP_PROFILE_ITERATIONS=2 rematerialize=true planner=hecate | moves=0
    fp16_loss_scaling | 2 2 | --fp16 --initial-loss-scale 1024 {DISTRIBUTED} | slots=2 overlap_degree=2
    groups_of_experts_sgd | 2 2 | {EXPERT_BIAS} --moe-router-num-groups 4 --moe-router-group-topk 2
        --optimizer sgd --lr 0.1 {NO_BIAS} --moe-z-loss-coeff 1e-3
        | slots=2 overlap_degree=2 rematerialize=true
    one_expert_a_device_30_iterations | 4 4 | --num-experts 4 --swiglu {OVERLAPS} {NO_BIAS} | slots=1
        overlap_degree=1 FSSDP_CHECK_PLANS=1 | num_iterations=30 reshard_interval=3
    half_of_layers_recomputed_dropout | 2 2 | --num-layers 4 --recompute-granularity full --recompute-method
        block --recompute-num-layers 2 --attention-dropout 0.1 --hidden-dropout 0.1 --moe-input-jitter-eps
        0.01 {BATCH16} | slots=2 overlap_degree=2 rematerialize=true
    allgather_dispatcher_weight_hashes | 4 2 | --moe-token-dispatcher-type allgather
        --check-weight-hash-across-dp-replicas-interval 1 | slots=2 overlap_degree=2
    multi_token_prediction_overlaps | 2 2 | {MTP} {OVERLAPS} {BATCH16} | slots=2 overlap_degree=2
    repeated_multi_token_prediction | 2 2 | {MTP} --mtp-num-layers 2 --mtp-use-repeated-layer {BATCH16}
        | slots=2 overlap_degree=3
    pipeline_multi_token_prediction_rematerialized | 4 2 | {PP2} {MTP} {GATED} {RECOMPUTE} | slots=2
        overlap_degree=2 rematerialize=true
    """
)
# Some iterations of these are trained by default: they have the features in few and cheap layouts.
# test_tiny_deepseek_v3.py has shared experts and multi-token prediction.
DEFAULT = (
    *("copies_overlaps_bf16", "interleaved_pipeline_overlaps", "experts_in_tensor_parallel_parts"),
    *("recomputed_moe_expert_bias_calibrated", "tp1_expert_tp2_dropping_gelu"),
)


@pytest.mark.parametrize("name", DEFAULT)
def test_losses_equal_stock_megatron(name, text_data, tmp_path):
    arguments = LAYOUTS[name].arguments.replace(BATCH16, "").replace(BATCH32, BATCH16)
    layout = replace(LAYOUTS[name], num_iterations=3, reshard_interval=1, arguments=arguments)
    compare(layout, text_data, tmp_path, plain=layout.num_ranks == 2)


def test_a_pipeline_stage_may_have_no_experts(text_data):
    arguments = "{PP2} {EP2} --moe-layer-freq ([0]+[1]) --train-iters 4"
    stock = train(4, arguments, text_data, strategy="none")
    flexmoe = "flexmoe placement_interval=1 window=1 FSSDP_PROFILE_ITERATIONS=1"
    for strategy in ("fssdp reshard_interval=1", flexmoe):
        assert_close(train(4, arguments, text_data, strategy=strategy), stock)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_of_longer_trainings_equal_stock_megatron(name, text_data, tmp_path):
    compare(LAYOUTS[name], text_data, tmp_path)


def compare(layout, data, folder, model=GPT, *, plain=True):
    """Train a layout under ``none``, ``fssdp`` and, if ``plain``, ``ep`` from one seed, and compare."""
    settings = f"fssdp {layout.settings} reshard_interval={layout.reshard_interval}"
    moving = replace(layout, settings=settings)
    stock = against_stock(moving, data, folder, moves=layout.moves, model=model)
    assert min(stock.losses[1:]) < stock.losses[0]
    if plain:
        assert_equal(trained(layout, "ep", data, model=model), stock)
