"""What strategies refuse and replace is decided from settings alone, for arguments and for configs."""

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.routing.topology_aware_router import check_gate
from megatron_fssdp.megatron_adapter.support.replaced_settings import (
    CHECKPOINT_REPLACEMENTS,
    DISPATCH_REPLACEMENTS,
    replace_settings,
)
from megatron_fssdp.megatron_adapter.support.supported_features import REFUSALS, check_supported

Module = Enum("Module", "attn mlp moe moe_router moe_preprocess mamba")
TE_GRAPHS = {"cuda_graph_impl": "transformer_engine", "sequence_parallel": True}
BOTH = [Module.attn, Module.moe_router]


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
    ],
)
def test_settings_that_a_strategy_can_serve_are_accepted(more: dict[str, Any]) -> None:
    check_supported("fssdp", settings(**more))


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}, "full_iteration"),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": [Module.attn]}, "--cuda-graph-impl local"),
        ({"enable_cuda_graph": True}, "--cuda-graph-impl local"),
        ({**TE_GRAPHS, "cuda_graph_modules": []}, "whole layers"),
        ({**TE_GRAPHS, "cuda_graph_modules": "full"}, "whole layers"),
        ({"external_cuda_graph": True}, "whole layers"),
        ({**TE_GRAPHS, "cuda_graph_modules": [Module.attn, Module.moe]}, "--cuda-graph-modules moe"),
        (
            {
                **TE_GRAPHS,
                "cuda_graph_modules": BOTH,
                "tensor_model_parallel_size": 2,
                "sequence_parallel": False,
            },
            "add --sequence-parallel",
        ),
        ({"expert_tensor_parallel_num_weight_shards": 2}, "--expert-tensor-parallel-num-weight-shards"),
        ({"expert_gtp_weight_remat_size": 2}, "--expert-tensor-parallel-num-weight-shards"),
        ({"moe_expert_rank_capacity_factor": 1.5}, "--moe-expert-rank-capacity-factor"),
        ({"num_experts": 9}, "--expert-model-parallel-size: got 2"),
        ({"moe_router_topk": 9}, "--moe-router-topk: got 9"),
    ],
)
def test_other_settings_are_refused_in_one_line_with_the_next_step(more: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match) as refusal:
        check_supported("fssdp", settings(**more))
    assert "\n" not in str(refusal.value)


def test_every_refusal_and_replacement_names_a_next_step() -> None:
    for what, _, advice in REFUSALS:
        assert advice.strip(), what
    for entry in (*DISPATCH_REPLACEMENTS, *CHECKPOINT_REPLACEMENTS):
        assert entry.meaning.strip(), entry.what


def test_the_topology_aware_gate_refuses_graphs_of_the_router() -> None:
    with pytest.raises(ConfigurationError, match="remove moe_router"):
        check_gate(settings(**TE_GRAPHS, cuda_graph_modules=BOTH))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (
            {
                "moe_token_dispatcher_type": "flex",
                "moe_enable_deepep": True,
                "moe_flex_dispatcher_backend": "hybridep",
            },
            {
                "moe_token_dispatcher_type": "alltoall",
                "moe_enable_deepep": False,
                "moe_flex_dispatcher_backend": "deepep",
            },
        ),
        ({"moe_token_dispatcher_type": "allgather"}, {"moe_token_dispatcher_type": "alltoall"}),
        (
            {"moe_router_padding_for_quantization": False, "moe_router_padding_for_fp8": True},
            {"moe_router_padding_for_quantization": False, "moe_router_padding_for_fp8": False},
        ),
        (
            {**TE_GRAPHS, "cuda_graph_modules": [Module.attn, Module.moe_router, Module.moe_preprocess]},
            {**TE_GRAPHS, "cuda_graph_modules": BOTH},
        ),
        ({"use_transformer_engine_op_fuser": True}, {"use_transformer_engine_op_fuser": False}),
    ],
)
def test_settings_of_megatrons_dispatcher_are_replaced_with_one_log_line(
    given: dict[str, Any], wanted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    args = SimpleNamespace(**given)
    for _ in range(2):  # The second time there is nothing left to replace.
        replace_settings("--moe-strategy ep", DISPATCH_REPLACEMENTS, args)
    assert vars(args) == wanted
    assert len(caplog.messages) == 1
    assert "--moe-strategy ep: --" in caplog.messages[0]


def test_only_rank_0_logs_replacements(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    replace_settings("ep", DISPATCH_REPLACEMENTS, SimpleNamespace(moe_token_dispatcher_type="flex"))
    assert not caplog.messages
