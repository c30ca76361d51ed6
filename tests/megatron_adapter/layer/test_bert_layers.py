"""Megatron's BERT has experts in the requested layers, whatever builds it, and is otherwise unchanged."""

import dataclasses
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.testing.parallel_state import run_megatron_ranks


def config_of(**keys: Any) -> Any:
    """Megatron's config of a tiny BERT on one rank."""
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    plain = {
        "num_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "use_cpu_initialization": True,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "pipeline_dtype": torch.float32,
    }
    return TransformerConfig(**{**plain, **keys})


def model_of(config: Any, spec: Any, **keys: Any) -> Any:
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(config, 2, spec, vocab_size=32, max_sequence_length=8, **keys)


def layers_of(model: Any) -> list[tuple[str, str]]:
    """Class of every layer and of its feed-forward part."""
    return [(type(layer).__name__, type(layer.mlp).__name__) for layer in model.encoder.layers]


def test_bert_models_have_experts_in_the_requested_layers() -> None:
    run_megatron_ranks(_check_models, 1)


def _check_models(rank: int, world_size: int) -> None:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec

    from megatron_fssdp import get_bert_layer_spec
    from megatron_fssdp.megatron_adapter.layer import bert_layers

    # Bound before the plugin is installed, as Megatron-LM's script does.
    stock = bert_layer_local_spec
    dense = model_of(config_of(), stock)
    bert_layers.install()

    dense_layer, moe = ("BertLayer", "MLP"), ("BertLayer", "MoELayer")
    every = model_of(config_of(num_moe_experts=4), stock)
    assert layers_of(every) == [moe] * 4
    assert (
        layers_of(model_of(config_of(num_moe_experts=4, moe_layer_freq=2), stock)) == [moe, dense_layer] * 2
    )
    listed = config_of(num_moe_experts=4, moe_layer_freq=[0, 0, 1, 0])
    assert layers_of(model_of(listed, stock)) == [dense_layer, dense_layer, moe, dense_layer]

    # Without experts nothing differs.
    assert layers_of(dense) == layers_of(model_of(config_of(), stock)) == [("TransformerLayer", "MLP")] * 4
    assert bert_layers.with_experts(stock, config_of()) is stock

    # A spec with experts keeps them, and a strategy's layers get their layer numbers.
    config = config_of(num_moe_experts=4)
    ours = model_of(config, get_bert_layer_spec(config, strategy="ep"))
    assert layers_of(ours) == [("BertLayer", "StrategyMoELayer")] * 4
    numbers = [layer.mlp.slot_layer.context.layer for layer in ours.encoder.layers]
    assert numbers == [1, 2, 3, 4]

    _check_attention(every)


def _check_attention(model: Any) -> None:
    """Words attend to later words, and no word attends to the padding."""
    import torch

    model.eval()
    mask = torch.tensor([[1] * 6 + [0] * 2])

    def logits(changed: int | None = None) -> Any:
        tokens = torch.arange(8).view(1, 8)
        if changed is not None:
            tokens[0, changed] = 31
        with torch.no_grad():
            return model(tokens, mask, tokentype_ids=torch.zeros_like(tokens))[0][0]

    plain = logits()
    # Padding routed elsewhere changes the number of an expert's rows, so sums round differently.
    tolerance = 1e-6 * plain.abs().max()
    assert (logits(changed=5)[0] - plain[0]).abs().max() > 100 * tolerance, (
        "the first word does not attend to the last one"
    )
    assert (logits(changed=7)[:6] - plain[:6]).abs().max() <= tolerance, "words attend to the padding"


def test_layers_are_numbered_over_pipeline_stages() -> None:
    assert run_megatron_ranks(_kinds_of_stage, 2, pp=2) == [
        ["MoELayer", "MLP", "MLP"],
        ["MoELayer", "MLP", "MLP"],
    ]


def _kinds_of_stage(rank: int, world_size: int) -> list[str]:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec

    from megatron_fssdp.megatron_adapter.layer.bert_layers import with_experts

    config = config_of(
        num_layers=6, num_moe_experts=4, moe_layer_freq=3, pipeline_model_parallel_size=world_size
    )
    model = model_of(
        config,
        with_experts(bert_layer_local_spec, config),
        pre_process=rank == 0,
        post_process=rank == world_size - 1,
    )
    return [type(layer.mlp).__name__ for layer in model.encoder.layers]


def test_checkpoints_name_the_norm_before_experts_as_with_transformer_engine() -> None:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec as stock

    from megatron_fssdp.megatron_adapter.layer.bert_layers import with_experts

    config = SimpleNamespace(num_moe_experts=4, moe_grouped_gemm=False)
    experts = with_experts(stock, config).params["experts"]
    assert "pre_mlp_layernorm." in stock.submodules.sharded_state_dict_keys_map
    assert list(experts.sharded_state_dict_keys_map) == ["input_layernorm."]
    same = {field.name for field in dataclasses.fields(experts)} - {"mlp", "sharded_state_dict_keys_map"}
    assert all(getattr(experts, name) is getattr(stock.submodules, name) for name in same)


def test_foreign_feed_forward_layers_are_left_alone() -> None:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec as stock
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_fssdp.megatron_adapter.layer.bert_layers import with_experts

    config = SimpleNamespace(num_moe_experts=4, moe_grouped_gemm=False)
    foreign = ModuleSpec(stock.module, submodules=dataclasses.replace(stock.submodules, mlp=partial(dict)))
    assert with_experts(foreign, config) is foreign
    once = with_experts(stock, config)
    assert with_experts(once, config) is once


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="has Transformer Engine")
def test_a_missing_transformer_engine_is_named_when_its_spec_is_used() -> None:
    run_megatron_ranks(_check_missing_spec, 1)


def _check_missing_spec(rank: int, world_size: int) -> None:
    from megatron_fssdp.megatron_adapter.layer import bert_layers

    bert_layers.install()
    # Import the spec from its module, as Megatron-LM's script does.
    from megatron.core.models.bert.bert_layer_specs import bert_layer_with_transformer_engine_spec

    for build in (
        lambda: model_of(config_of(num_moe_experts=4), bert_layer_with_transformer_engine_spec),
        lambda: model_of(config_of(), bert_layer_with_transformer_engine_spec),
        lambda: bert_layers.stock_spec(use_transformer_engine=True),
    ):
        with pytest.raises(ConfigurationError, match="--spec local"):
            build()
