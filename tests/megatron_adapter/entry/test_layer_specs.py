"""The spec functions build and share the strategy's layers and refuse bad arguments."""

import copy
import inspect
from typing import Any

import pytest

import megatron_fssdp
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.testing.parallel_state import run_megatron_ranks

CONFIG: Any = {
    **{"hidden_size": 16, "num_attention_heads": 1, "moe_ffn_hidden_size": 16, "num_moe_experts": 4},
    **{"expert_model_parallel_size": 2, "use_cpu_initialization": True},
}


def test_megatron_finds_the_stage_in_the_signature() -> None:
    """Otherwise it would give all model chunks of a rank the layers of the first one."""
    assert "vp_stage" in inspect.signature(megatron_fssdp.get_gpt_decoder_block_spec).parameters


def test_layer_specs_hold_the_strategys_moe_layers() -> None:
    run_megatron_ranks(_check_specs, 2, ep=2)


def _check_specs(rank: int, world_size: int) -> None:
    from functools import partial

    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_fssdp
    from megatron_fssdp.megatron_adapter.layer.moe_layer import StrategyMoELayer

    config = TransformerConfig(num_layers=4, moe_layer_freq=[0, 1, 0, 1], **CONFIG)
    block = megatron_fssdp.get_gpt_decoder_block_spec(config, False, strategy="fssdp", settings={"slots": 1})
    builders = [layer.submodules.mlp for layer in block.layer_specs]
    ours = [b for b in builders if isinstance(b, partial) and b.func is StrategyMoELayer]
    assert len(ours) == 2, builders
    assert ours[0].keywords["session"] is ours[1].keywords["session"]
    assert copy.deepcopy(ours[0]).keywords["session"] is ours[0].keywords["session"]

    stock = megatron_fssdp.get_gpt_decoder_block_spec(config, False, strategy="none")
    assert [layer.submodules.mlp.func for layer in stock.layer_specs[1::2]] == [MoELayer, MoELayer]

    session = megatron_fssdp.start_session("ep")
    spec = megatron_fssdp.get_moe_module_spec(use_te=False, num_experts=4, session=session)
    first, second = (spec(config=config, pg_collection=None) for _ in range(2))
    second.set_layer_number(4)
    assert [one.context.layer for one in session.runtime.layers] == [0, 4]
    assert set(first.state_dict()) == set(MoELayer(config, spec.keywords["submodules"]).state_dict())

    with pytest.raises(ConfigurationError, match="strategy='fssdp'"):
        megatron_fssdp.get_moe_module_spec(use_te=False, num_experts=4)
    with pytest.raises(ConfigurationError, match="wanted one of them"):
        megatron_fssdp.get_moe_module_spec(use_te=False, num_experts=4, session=session, strategy="ep")
    with pytest.raises(ConfigurationError, match="slots: got 5, wanted 0 to 4"):
        megatron_fssdp.get_moe_module_spec(
            use_te=False, num_experts=4, strategy="fssdp", settings={"slots": 5}
        )(config=config, pg_collection=None)
    config.moe_paged_stash = True
    with pytest.raises(ConfigurationError, match="--moe-paged-stash"):
        spec(config=config, pg_collection=None)
