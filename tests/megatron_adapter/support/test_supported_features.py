"""What strategies refuse is decided from settings alone, for arguments and for configs."""

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.megatron_adapter.checkpoints.checkpoint_arguments import (
    CHECKPOINT_REPLACEMENTS,
    fit_checkpoint_arguments,
)
from megatron_fssdp.megatron_adapter.routing.topology_aware_gate import check_gate
from megatron_fssdp.megatron_adapter.support.dispatch_limits import (
    RULES,
    check_dispatch,
    check_slots,
    keeps_flex,
    slot_multiple,
)
from megatron_fssdp.megatron_adapter.support.supported_features import REFUSALS, check_supported
from megatron_fssdp.strategies.registry import build_strategy

Module = Enum("Module", "attn mlp moe moe_router moe_preprocess mamba")
TE_GRAPHS = {"cuda_graph_impl": "transformer_engine", "sequence_parallel": True}
BOTH = [Module.attn, Module.moe_router]
EQUAL = {"tensor_model_parallel_size": 2, "sequence_parallel": False}
DIVIDED = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def settings(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"num_experts": 8, "expert_model_parallel_size": 2, **more})


@pytest.mark.parametrize(
    "more",
    [
        {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},
        {"moe_permute_fusion": True, "moe_router_fusion": True},
        {"moe_router_padding_for_quantization": True},
        {**TE_GRAPHS, "cuda_graph_modules": [Module.attn]},
        {**TE_GRAPHS, "cuda_graph_modules": Module.attn},
        {**TE_GRAPHS, "cuda_graph_modules": ["attn", "mlp", "mamba", "moe_router", "moe_preprocess"]},
        {**TE_GRAPHS, "cuda_graph_modules": BOTH, "tensor_model_parallel_size": 2},
        {"cuda_graph_impl": "none", "cuda_graph_modules": [Module.moe]},
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_num_weight_shards": 2},
        {"moe_router_topk": 8},
        {"moe_expert_rank_capacity_factor": 1.5, "use_transformer_engine_op_fuser": True},
        {"delay_wgrad_compute": True},
    ],
)
def test_settings_that_a_strategy_can_serve_are_accepted(more: dict[str, Any]) -> None:
    check_supported("fssdp", settings(**more))


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}, "--cuda-graph-impl local"),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": [Module.attn]}, "--cuda-graph-impl local"),
        ({"enable_cuda_graph": True}, "--cuda-graph-impl local"),
        ({**TE_GRAPHS, "cuda_graph_modules": []}, "--cuda-graph-impl local"),
        ({**TE_GRAPHS, "cuda_graph_modules": "full"}, "--cuda-graph-impl local"),
        ({"external_cuda_graph": True}, "--cuda-graph-impl local"),
        ({**TE_GRAPHS, "cuda_graph_modules": [Module.attn, Module.moe]}, "--cuda-graph-impl local"),
        ({**TE_GRAPHS, "cuda_graph_modules": BOTH, **EQUAL}, "add --sequence-parallel"),
        ({"expert_tensor_parallel_num_weight_shards": 2}, "--expert-tensor-parallel-num-weight-shards"),
        ({"expert_gtp_weight_remat_size": 2}, "--expert-tensor-parallel-num-weight-shards"),
        (
            {**DIVIDED, "expert_tensor_parallel_size": 1, "add_bias_linear": True},
            "biases of experts under sequence parallelism",
        ),
        (
            {"expert_tensor_parallel_size": 2, "add_bias_linear": True},
            "biases of experts under expert tensor",
        ),
        ({"moe_paged_stash": True}, "--moe-paged-stash"),
        ({"num_experts": 9}, "--expert-model-parallel-size: got 2"),
        ({"moe_router_topk": 9}, "--moe-router-topk: got 9"),
    ],
)
def test_other_settings_are_refused_in_one_line_with_the_next_step(more: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match) as refusal:
        check_supported("fssdp", settings(**more))
    assert "\n" not in str(refusal.value)


def test_every_refusal_and_replacement_names_a_next_step() -> None:
    for what, _, advice in (*REFUSALS, *RULES):
        assert advice.strip(), what
    for entry in CHECKPOINT_REPLACEMENTS:
        assert entry.meaning.strip(), entry.what


def test_the_topology_aware_gate_refuses_graphs_of_the_router() -> None:
    with pytest.raises(ConfigurationError, match="remove moe_router"):
        check_gate(settings(**TE_GRAPHS, cuda_graph_modules=BOTH))


FLEX = {"moe_token_dispatcher_type": "flex"}
NCCL = {**FLEX, "moe_flex_dispatcher_backend": "ncclep"}
DELAYED = {"delay_wgrad_compute": True}
PREPROCESS = {**TE_GRAPHS, "cuda_graph_modules": ["moe_router", "moe_preprocess"]}
PADDING = {"moe_router_padding_for_quantization": True}
GATE = {"router": "topology_aware", "leaving_share": 0.5}
KEPT = {"slots": 2, "reshard_interval": 0}


def strategy_of(name: str, keys: dict[str, Any]) -> Any:
    return build_strategy(name, STRATEGIES[name].settings.model_validate(keys))


@pytest.mark.parametrize(
    ("strategy", "keys", "more"),
    [
        ("fssdp", {}, FLEX),
        ("auto", {}, {**FLEX, **DIVIDED}),
        ("parm", {"schedule": "s1"}, FLEX),
        ("fssdp", KEPT, NCCL),
        ("smartmoe", {}, NCCL),
        ("fssdp", {"reshard_interval": 0}, DELAYED),
        ("fastermoe", {"smart_schedule": True}, {}),
        ("fssdp", KEPT, {**PREPROCESS, **DIVIDED}),
        ("ep", {}, PREPROCESS),
        ("flexmoe", {}, PREPROCESS),
        ("parm", {}, {**PREPROCESS, **PADDING}),
        ("parm", {"schedule": "s2"}, {**PADDING, **DIVIDED}),
        ("ep", {**GATE, "schedule": "s1"}, {**EQUAL, "seq_length": 8}),
        ("parm", {"schedule": "s2"}, {**EQUAL, "seq_length": 9}),
        ("fastermoe", {"smart_schedule": True}, {**DIVIDED, "expert_tensor_parallel_size": 1}),
    ],
)
def test_dispatchers_and_graphs_that_fit_the_slots_are_accepted(
    strategy: str, keys: dict[str, Any], more: dict[str, Any]
) -> None:
    check_dispatch(strategy, strategy_of(strategy, keys), settings(**more))


@pytest.mark.parametrize(
    ("strategy", "keys", "more", "match"),
    [
        ("fssdp", {}, {**FLEX, **EQUAL}, "add --sequence-parallel"),
        ("fastermoe", {"smart_schedule": True}, FLEX, "two dispatchers"),
        ("fssdp", {"exchange": "deduplicated"}, FLEX, "two dispatchers"),
        ("parm", {"schedule": "s1"}, {**FLEX, **DIVIDED}, "two dispatchers"),
        ("fssdp", {}, NCCL, "set slots"),
        ("fssdp", {"slots": 2}, NCCL, "set slots"),
        ("fssdp", {}, DELAYED, "set reshard_interval=0"),
        ("quota", {}, DELAYED, "single micro-batches"),
        ("ep", {"smart_schedule": True}, DELAYED, "smart_schedule"),
        ("parm", {"schedule": "s2"}, {**PADDING, **EQUAL}, "no multiple"),
        ("parm", {"schedule": "auto"}, {**PREPROCESS, **DIVIDED}, "remove moe_preprocess"),
        ("ep", {"smart_schedule": "by_price"}, PREPROCESS, "remove moe_preprocess"),
        ("fssdp", {"slots": 2}, PREPROCESS, "reshard_interval=0"),
        ("fssdp", {"reshard_interval": 0}, PREPROCESS, "set slots"),
        ("smartmoe", {}, PREPROCESS, "without fixed slots"),
        ("fssdp", {**KEPT, "planner": "hecate"}, PREPROCESS, "after the gate"),
        ("fastermoe", {"slots": 1}, PREPROCESS, "after the gate"),
        ("ep", {}, {**PREPROCESS, "moe_expert_capacity_factor": 1.0}, "capacity"),
        ("fssdp", {"slots": 125}, FLEX, "slots: got 129"),
        ("ep", {}, {**EQUAL, "moe_latent_size": 8}, "add --sequence-parallel"),
        ("ep", {}, {**EQUAL, "seq_length": 9}, "got 9 tokens of a sequence, wanted a multiple of 2"),
        ("fastermoe", {"smart_schedule": True}, DIVIDED, "--expert-tensor-parallel-size 1"),
        ("flexmoe", {}, {"fp16": True}, "use --bf16"),
    ],
)
def test_others_are_refused_before_a_model_is_built(
    strategy: str, keys: dict[str, Any], more: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigurationError, match=match) as refusal:
        check_dispatch(strategy, strategy_of(strategy, keys), settings(**more))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("back_end", "most", "num_devices", "wanted"),
    [
        ("deepep", 128, 8, "at most 128 with DeepEP over 8 ranks"),
        ("deepep", 64, 16, "at most 64 with DeepEP over 16 ranks"),
        ("ncclep", 3, 2, "3 as in layers before"),
    ],
)
def test_back_ends_of_the_flex_dispatcher_limit_the_slots(
    back_end: str, most: int, num_devices: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    config = SimpleNamespace(**FLEX, moe_flex_dispatcher_backend=back_end)
    check_slots(config, most, num_devices, {3})
    with pytest.raises(ConfigurationError, match=f"slots: got {most + 1} .*{wanted}"):
        check_slots(config, most + 1, num_devices, {3})
    check_slots(SimpleNamespace(moe_token_dispatcher_type="alltoall"), 999, num_devices)


@pytest.mark.parametrize(
    ("back_end", "num_devices", "domain", "wanted"),
    [
        ("hybridep", 2, None, 2),
        ("hybridep", 8, None, 1),
        ("hybridep", 8, "6", 2),
        ("hybridep", 8, "1", 4),
        ("deepep", 2, None, 1),
    ],
)
def test_hybridep_gets_slots_in_multiples(
    back_end: str, num_devices: int, domain: str | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if domain is not None:
        monkeypatch.setenv("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", domain)
    config = SimpleNamespace(**FLEX, moe_flex_dispatcher_backend=back_end)
    assert slot_multiple(config, num_devices) == wanted


def test_auto_keeps_the_flex_dispatcher() -> None:
    assert keeps_flex(strategy_of("auto", {}), settings(**FLEX))
    assert not keeps_flex(strategy_of("auto", {}), settings())


def test_only_rank_0_logs_replacements(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    args = SimpleNamespace(save="x", ckpt_format="torch_dist", ckpt_assume_constant_structure=True)
    fit_checkpoint_arguments("fssdp", args)
    assert not args.ckpt_assume_constant_structure
    assert not caplog.messages
