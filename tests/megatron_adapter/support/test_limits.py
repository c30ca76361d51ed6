import os
import re
from unittest import mock

import pytest
import yaml
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run import megatron_options
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.megatron_adapter.support import limits
from megatron_fssdp.megatron_adapter.support.limits import check_limits, check_slots
from megatron_fssdp.megatron_adapter.support.megatron_settings import OPTIONAL, MegatronSettings, attributes
from megatron_fssdp.strategies.registry import build_strategy
from tests.support.tables import cells

from ..layer.small_config import moe_config

NAMES = {
    "EQUAL": "tensor_model_parallel_size=2",
    "DIVIDED": "tensor_model_parallel_size=2 sequence_parallel=true",
    "GRAPHS": "cuda_graph_impl=transformer_engine sequence_parallel=true cuda_graph_modules=",
    "PREPROCESS": "cuda_graph_impl=transformer_engine cuda_graph_modules=[moe_router,moe_preprocess]",
    "FLEX": "moe_token_dispatcher_type=flex",
    "NCCL": "moe_token_dispatcher_type=flex moe_flex_dispatcher_backend=ncclep",
    "DELAYED": "delay_wgrad_compute=true",
    "PADDING": "moe_router_padding_for_quantization=true",
    "GATE": "router=topology_aware leaving_share=0.5",
    "KEPT": "slots=2 reshard_interval=0",
    "SAVE": "save=folder ckpt_format=torch_dist",
}
# strategy and its settings | Megatron's settings, beside 8 experts on 2 devices | what refuses them: the code
# of a limit, or words of another message; empty if they are accepted
TABLE = """
    fssdp | {FLEX} moe_flex_dispatcher_backend=deepep |
    fssdp | {PADDING} |
    fssdp {KEPT} | {GRAPHS}[attn,mlp,mamba,moe_router,moe_preprocess] tensor_model_parallel_size=2 |
    fssdp | {GRAPHS}attn |
    fssdp | {EQUAL} expert_tensor_parallel_num_weight_shards=2 |
    fssdp | moe_router_topk=8 |
    fssdp | moe_expert_rank_capacity_factor=1.5 use_transformer_engine_op_fuser=true |
    ep | fp8=hybrid fp8_recipe=blockwise moe_grouped_gemm=true |
    fssdp | cuda_graph_impl=full_iteration cuda_graph_modules=[] | layer_graphs
    fssdp | enable_cuda_graph=true | layer_graphs
    fssdp | external_cuda_graph=true | layer_graphs
    fssdp | {GRAPHS}[] | layer_graphs
    fssdp | {GRAPHS}[attn,moe] | layer_graphs
    fssdp | {GRAPHS}[attn,moe_router] {EQUAL} sequence_parallel=false | graph_router
    fssdp | expert_tensor_parallel_num_weight_shards=2 | gtp
    fssdp | expert_gtp_weight_remat_size=2 | gtp
    fssdp | {DIVIDED} expert_tensor_parallel_size=1 add_bias_linear=true | biases_of_sequences
    fssdp | fp8_param_gather=true | quantized_parameters
    fssdp | fp8=hybrid fp8_recipe=delayed | kept_scales
    fssdp | fp4=e2m1 | quantized_single
    fssdp | moe_single_grouped_weight=true | grouped_weight
    fssdp | use_torch_fsdp2=true | other_ddp
    fssdp | tensor_parallel_num_weight_shards=2 | gtp
    ep | mlp_chunks_for_training=2 | chunks
    ep | moe_use_grouped_tensor=true | never_run
    ep | moe_use_grouped_tensor=true use_transformer_engine_op_fuser=true |
    ep | {FLEX} moe_flex_dispatcher_backend=deepep_v2 num_moe_experts=8 | unknown_dispatcher
    ep | moe_token_dispatcher_type=new num_moe_experts=8 | unknown_dispatcher
    ep | save_activations_interval=2 | saved_rows
    ep | perform_rl_step=true | other_training
    flexmoe | use_mup=true | mup
    fssdp | NVTE_USE_CUTLASS_GROUPED_GEMM='1' grad_reduce_in_bf16=true | cutlass
    fssdp | NVTE_USE_CUTLASS_GROUPED_GEMM='0' grad_reduce_in_bf16=true |
    fssdp | NVTE_USE_CUTLASS_GROUPED_GEMM='1' |
    fssdp | moe_paged_stash=true | paged_stash
    fssdp | transformer_impl=inference_optimized | inference
    fssdp | num_experts=0 | --num-experts
    fssdp slots=9 | | slots 9
    auto | {FLEX} {DIVIDED} |
    parm schedule=s1 | {FLEX} |
    fssdp {KEPT} | {NCCL} |
    fssdp reshard_interval=0 | {DELAYED} |
    fastermoe smart_schedule=true | |
    fssdp {KEPT} | {PREPROCESS} {DIVIDED} |
    ep | {PREPROCESS} |
    parm | {PREPROCESS} {PADDING} |
    parm schedule=s2 | {PADDING} {DIVIDED} |
    ep {GATE} schedule=s1 | {EQUAL} seq_length=8 |
    ep {GATE} | moe_router_load_balancing_type=[aux_loss,seq_aux_loss] |
    parm schedule=s2 | {EQUAL} seq_length=9 |
    fastermoe smart_schedule=true | {DIVIDED} expert_tensor_parallel_size=1 |
    fssdp | {FLEX} {EQUAL} | flex_equal_tokens
    ep smart_schedule=true | {EQUAL} expert_tensor_parallel_size=1 | steps_equal_tokens
    fastermoe smart_schedule=true | {FLEX} | flex_send
    fssdp exchange=deduplicated | {FLEX} | flex_send
    parm schedule=s1 | {FLEX} {DIVIDED} | flex_send
    fssdp | {NCCL} | nccl_slots
    fssdp | {DELAYED} | delay_reshards
    quota | {DELAYED} | delay_passes
    ep smart_schedule=true | {DELAYED} | delay_steps
    parm schedule=s2 | {PADDING} {EQUAL} | padding_s2
    parm schedule=s2 | {EQUAL} moe_router_force_load_balancing=true | random_whole
    parm schedule=baseline | {EQUAL} moe_router_force_biased=0.0 | random_whole
    parm | {EQUAL} moe_router_force_biased=0.0 |
    parm schedule=s2 | {DIVIDED} moe_router_force_biased=0.0 |
    parm schedule=auto | {PREPROCESS} {DIVIDED} | graph_send
    ep smart_schedule=by_price | {PREPROCESS} | graph_send
    fssdp slots=2 | {PREPROCESS} | graph_slots
    fssdp reshard_interval=0 | {PREPROCESS} | graph_slots
    smartmoe | {PREPROCESS} | graph_slots
    fssdp {KEPT} planner=hecate | {PREPROCESS} | graph_after_gate
    fastermoe slots=1 | {PREPROCESS} | graph_after_gate
    ep | {PREPROCESS} moe_expert_capacity_factor=1.0 | graph_capacity
    fssdp slots=125 | {FLEX} | slots 129
    ep | {EQUAL} moe_latent_size=8 | latent_tokens
    ep | {EQUAL} seq_length=9 | --seq-length 9 2 schedule s2
    parm schedule=s1 | {EQUAL} seq_length=9 | --seq-length 9 2 schedule s2
    ep {GATE} | moe_router_fusion=true | topology
    ep {GATE} | moe_enable_routing_replay=true | topology
    ep {GATE} | moe_router_group_topk=1 | topology
    ep {GATE} | moe_router_load_balancing_type=sinkhorn num_moe_experts=8 | topology
    ep {GATE} | {GRAPHS}[attn,moe_router] | topology
    fastermoe smart_schedule=true | {DIVIDED} | steps_in_parts
    flexmoe | fp16=true | fp16
    fssdp | use_precision_aware_optimizer=true | other_states
    fssdp reshard_interval=0 | use_precision_aware_optimizer=true |
    fssdp | {SAVE} |
    fssdp | {SAVE} non_persistent_ckpt_type=global non_persistent_save_interval=5 |
    fssdp reshard_interval=0 | {SAVE} ckpt_format=torch |
    fssdp | {SAVE} ckpt_format=torch | ckpt_format
    fssdp | non_persistent_save_interval=5 ckpt_format=torch_dcp | ckpt_format
    fssdp | ckpt_convert_format=torch | ckpt_convert
    fssdp | {SAVE} non_persistent_ckpt_type=local | local_ckpt
    fssdp | {SAVE} save_params_interval=5 | saved_by_name
"""
LIMITS = {limit.code: limit for limit in (*limits.EVERY, *limits.SOME)}
ROWS = cells(TABLE, **NAMES)


def values(text):
    return {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in text.split())}


def config(**more):
    """Megatron's config of a model with 8 experts on 2 devices."""
    return moe_config(2, 8, 8, **{"num_attention_heads": 2, **more})


def settings_of(given):
    """Settings of arguments that Megatron parsed; what has no argument comes from a config."""
    if given.keys() - megatron_options.options().keys():
        new = {name for name in given if not hasattr(TransformerConfig, name)}
        assert all(OPTIONAL in attributes()[name] for name in new)
        built = config(**{name: value for name, value in given.items() if name not in new})
        vars(built).update({name: given[name] for name in new})  # of a later Megatron
        return MegatronSettings.of(built)
    experts = {"num_experts": 8, "expert_model_parallel_size": 2, "add_bias_linear": False}
    words = megatron_options.words({**experts, **given})
    return MegatronSettings.of(megatron_options.megatron_parser().parse_args(words))


def case(strategy, more):
    name, _, keys = strategy.partition(" ")
    built = build_strategy(name, STRATEGIES[name].settings.model_validate(values(keys)))
    given = values(more)
    with mock.patch.dict(os.environ, {name: given.pop(name) for name in [*given] if name.isupper()}):
        return name, built, settings_of(given)


@pytest.mark.parametrize(("strategy", "more", "refused"), ROWS)
def test_what_cannot_be_served_is_refused_in_one_line_with_the_next_step(strategy, more, refused):
    if not refused:
        check_limits(*case(strategy, more))
        return
    with pytest.raises(ConfigurationError) as refusal:
        check_limits(*case(strategy, more))
    message = str(refusal.value)
    if refused in LIMITS:
        _, feature, _, advice = LIMITS[refused]
        assert advice
        before, _, given = message.removesuffix(f": {advice}").partition(f"{feature}")
        assert before.endswith("does not support ")
        assert given in ("", f" (got {more.partition('=')[0]})")
    else:
        assert set(refused.split()) <= set(re.findall(r"[\w-]+", message))


def test_every_limit_has_a_row():
    assert LIMITS.keys() <= {refused for *_, refused in ROWS}


@pytest.mark.parametrize("strategy", ["fssdp", "smartmoe", "flexmoe"])
def test_the_strategy_that_keeps_owners_is_accepted(strategy):
    more = "use_precision_aware_optimizer=true"
    with pytest.raises(ConfigurationError) as refusal:
        check_limits(*case(strategy, more))
    advised = re.search(r"(\w+) with (reshard_interval=0)", str(refusal.value)).groups()
    check_limits(*case(" ".join(advised), more))


def test_auto_keeps_the_flex_dispatcher():
    for strategy, more, wanted in (
        ("auto", NAMES["FLEX"], True),
        ("auto", "", False),
        ("parm schedule=s1", NAMES["FLEX"], False),
    ):
        _, built, settings = case(strategy, more)
        assert limits.keeps_flex(settings, built) is wanted


def of_flex(back_end):
    return MegatronSettings.of(config(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=back_end))


@pytest.mark.parametrize(
    ("back_end", "most", "num_devices"), [("deepep", 128, 8), ("deepep", 64, 16), ("ncclep", 3, 2)]
)
def test_back_ends_of_the_flex_dispatcher_limit_the_slots(back_end, most, num_devices):
    settings = of_flex(back_end)
    check_slots(settings, most, num_devices, {3})
    with pytest.raises(ConfigurationError, match=rf"slots\b.*\b{most + 1}\b.*\b{most}\b"):
        check_slots(settings, most + 1, num_devices, {3})
    check_slots(MegatronSettings.of(config(moe_token_dispatcher_type="alltoall")), 999, num_devices)


@pytest.mark.parametrize(
    ("back_end", "num_devices", "domain", "wanted"),
    [
        ("hybridep", 2, "", 2),
        ("hybridep", 8, "", 1),
        ("hybridep", 8, "6", 2),
        ("hybridep", 8, "1", 4),
        ("deepep", 2, "", 1),
    ],
)
def test_hybridep_gets_slots_in_multiples(back_end, num_devices, domain, wanted, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", domain or "0")
    assert limits.slot_multiple(of_flex(back_end), num_devices) == wanted
