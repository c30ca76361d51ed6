"""Megatron's BERT has experts in the requested layers, whatever builds it, and is otherwise unchanged."""

import dataclasses
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec as stock
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.layer import bert_layers
from megatron_fssdp.megatron_adapter.layer.bert_layers import with_experts
from megatron_fssdp.megatron_adapter.layer.model_layers import join
from megatron_fssdp.pretraining.pretrain_bert import stock_spec
from tests.support.training_preload import on_ranks

from .small_config import moe_config, session_of


def model_of(spec, num_experts=4, **keys):
    """A tiny BERT."""
    options = {"num_layers": 4, "num_attention_heads": 2, "add_bias_linear": True, "hidden_dropout": 0.0}
    config = moe_config(1, 16, num_experts or 1, **options, attention_dropout=0.0, **keys)
    config.num_moe_experts = num_experts
    return BertModel(config, 2, spec, vocab_size=32, max_sequence_length=8)


def kinds_of(model):
    return [type(layer.mlp).__name__ for layer in model.encoder.layers]


@on_ranks(1)
def test_bert_models_have_experts_in_the_requested_layers():
    # Bound before the plugin is installed, as Megatron-LM's script does.
    dense = model_of(stock, None)
    bert_layers.install()
    every = model_of(stock)
    assert kinds_of(every) == ["MoELayer"] * 4
    assert kinds_of(model_of(stock, moe_layer_freq=2)) == ["MoELayer", "MLP"] * 2
    assert kinds_of(model_of(stock, moe_layer_freq=[0, 0, 1, 0])) == ["MLP", "MLP", "MoELayer", "MLP"]
    # Without experts nothing differs.
    for model in (dense, model_of(stock, None)):
        assert kinds_of(model) == ["MLP"] * 4
        assert {type(layer).__name__ for layer in model.encoder.layers} == {"TransformerLayer"}
    # A strategy's layers have the numbers of Megatron's.
    ours = model_of(stock)
    joined = join(ours, session_of("ep", {}))
    assert [layer.slot_layer.local.context.layer for layer in joined] == [1, 2, 3, 4]
    assert kinds_of(ours) == ["StrategyMoELayer"] * 4
    _check_attention(every)


def _check_attention(model):
    """Words attend to later words, and no word attends to the padding."""
    model.eval()
    mask = torch.tensor([[1] * 6 + [0] * 2])

    def logits(changed=None):
        tokens = torch.arange(8).view(1, 8)
        if changed is not None:
            tokens[0, changed] = 31
        with torch.no_grad():
            return model(tokens, mask, tokentype_ids=torch.zeros_like(tokens))[0][0]

    plain = logits()
    # Padding routed elsewhere changes the number of an expert's rows, so sums round differently.
    tolerance = 1e-6 * plain.abs().max()
    assert (logits(changed=5)[0] - plain[0]).abs().max() > 100 * tolerance, "does not attend to the last word"
    assert (logits(changed=7)[:6] - plain[:6]).abs().max() <= tolerance, "words attend to the padding"


def test_specs_differ_only_in_the_layers_with_experts():
    config = SimpleNamespace(num_moe_experts=4, moe_grouped_gemm=False)
    ours = with_experts(stock, config)
    experts = ours.params["experts"]
    # Checkpoints name the norm before experts as with Transformer Engine.
    assert "pre_mlp_layernorm." in stock.submodules.sharded_state_dict_keys_map
    assert list(experts.sharded_state_dict_keys_map) == ["input_layernorm."]
    same = {field.name for field in dataclasses.fields(experts)} - {"mlp", "sharded_state_dict_keys_map"}
    assert all(getattr(experts, name) is getattr(stock.submodules, name) for name in same)
    # Foreign feed-forward layers, and those that have experts already, are left alone.
    foreign = ModuleSpec(stock.module, submodules=dataclasses.replace(stock.submodules, mlp=partial(dict)))
    for spec in (foreign, ours):
        assert with_experts(spec, config) is spec


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="has Transformer Engine")
def test_a_missing_transformer_engine_is_named():
    with pytest.raises(ConfigurationError, match="--transformer-impl local"):
        stock_spec(use_transformer_engine=True)
