"""What a program attaches: a strategy by its name, or that of the environment."""

import os

import pytest

import megatron_fssdp
from megatron_fssdp.config.errors import ConfigurationError
from tests.support.training_preload import on_ranks


def test_the_former_functions_name_their_successor():
    with pytest.raises(AttributeError, match="attach"):
        megatron_fssdp.start_session  # noqa: B018


@on_ranks(2, ep=2)
def test_the_environment_asks_for_a_strategy_with_settings():
    from megatron_fssdp.megatron_adapter.iterations.attachment import current

    assert megatron_fssdp.attach_from_environment() is None
    os.environ["MEGATRON_FSSDP_SETTINGS"] = "slots=1, overlap_degree=2"
    with pytest.raises(ConfigurationError, match="MEGATRON_FSSDP_STRATEGY"):
        megatron_fssdp.attach_from_environment()
    os.environ["MEGATRON_FSSDP_STRATEGY"] = "fssdp"
    attachment = megatron_fssdp.attach_from_environment()
    assert attachment is current()
    assert (attachment.name, attachment.settings.slots) == ("fssdp", 1)
    assert megatron_fssdp.attach_from_environment("arguments", of=None) is attachment
    megatron_fssdp.attach("prophet", {"slots": 2})
    assert (current().name, current().settings.slots) == ("prophet", 2)
    with pytest.raises(ConfigurationError, match="slots"):
        megatron_fssdp.attach("fssdp", {"slots": -1})
