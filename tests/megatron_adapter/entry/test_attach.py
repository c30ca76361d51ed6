"""What a program attaches and names: strategies, the environment, and the spec of hosts that take one."""

import inspect
from argparse import Namespace

import pytest

import megatron_fssdp
from megatron_fssdp.config.errors import ConfigurationError
from tests.support.training_preload import run_megatron_ranks

from ..layer.small_config import moe_config


def test_megatron_finds_the_stage_in_the_signature() -> None:
    """Otherwise it would give all model chunks of a rank the layers of the first one."""
    assert "vp_stage" in inspect.signature(megatron_fssdp.get_gpt_decoder_block_spec).parameters


def test_the_former_functions_name_their_successor() -> None:
    with pytest.raises(AttributeError, match="attach"):
        megatron_fssdp.start_session  # noqa: B018


def test_specs_are_megatrons_and_attach_what_is_asked_for() -> None:
    run_megatron_ranks(_check_specs, 2, ep=2)


def _check_specs(rank: int, world_size: int) -> None:
    import os

    from megatron.core.transformer.moe.moe_layer import MoELayer

    import megatron_fssdp
    from megatron_fssdp.megatron_adapter.iterations.attachment import current

    spec_of = megatron_fssdp.get_gpt_decoder_block_spec
    config = moe_config(2, 16, 4, num_layers=4, moe_layer_freq=[0, 1, 0, 1])
    with pytest.raises(ConfigurationError, match="strategy='fssdp'"):
        spec_of(config, False)
    os.environ["MEGATRON_FSSDP_SETTINGS"] = "slots=1, overlap_degree=2"
    with pytest.raises(ConfigurationError, match="MEGATRON_FSSDP_STRATEGY"):
        megatron_fssdp.attach_from_environment()
    os.environ["MEGATRON_FSSDP_STRATEGY"] = "fssdp"
    # slime's form, with arguments, config and stage.
    for block in (spec_of(Namespace(), config, None), spec_of(config, False)):
        assert [layer.submodules.mlp.func for layer in block.layer_specs[1::2]] == [MoELayer, MoELayer]
    attachment = current()
    assert (attachment.name, attachment.settings.slots) == ("fssdp", 1)
    assert megatron_fssdp.attach_from_environment("arguments", of=None) is attachment
    spec_of(config, False, strategy="prophet", settings={"slots": 2})
    assert (current().name, current().settings.slots) == ("prophet", 2)
    with pytest.raises(ConfigurationError, match="slots"):
        megatron_fssdp.attach("fssdp", {"slots": -1})
