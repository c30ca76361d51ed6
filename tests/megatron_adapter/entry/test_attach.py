"""What a program attaches: a strategy by its name, or that of the environment."""

import os
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import megatron_fssdp
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.iterations.attachment import current
from tests.support.training_preload import on_ranks


def test_the_former_functions_name_their_successor():
    with pytest.raises(AttributeError, match="attach"):
        megatron_fssdp.start_session  # noqa: B018


@on_ranks(2, ep=2)
def test_the_environment_asks_for_a_strategy_with_settings():
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
    with pytest.raises(ConfigurationError, match="got 'slots=2', wanted a mapping"):
        megatron_fssdp.attach("fssdp", "slots=2")


@dataclass
class Section:
    """A section of a host's settings."""

    fp8: str | None = None
    fp8_recipe: str = "delayed"
    moe_grouped_gemm: bool = True
    num_moe_experts: int = 8
    expert_model_parallel_size: int = 2
    use_precision_aware_optimizer: bool = False


@on_ranks(1)
def test_a_hosts_settings_are_refused_as_they_will_be_when_its_model_joins():
    # Owners stay where somebody may read experts by name, so their optimizer may keep other states.
    host = SimpleNamespace(model=Section(use_precision_aware_optimizer=True))
    megatron_fssdp.attach("fssdp", host=host)
    with pytest.raises(ConfigurationError, match="--use-precision-aware-optimizer"):
        megatron_fssdp.attach("fssdp", {"reshard_interval": 2}, host=host)
    with pytest.raises(ConfigurationError, match="wanted your word"):
        megatron_fssdp.attach("smartmoe", host=host)


@on_ranks(1)
def test_what_sections_of_megatron_bridge_mean_for_others_counts():
    quantized, delayed = Section("e4m3", "mxfp8"), Section("e4m3")
    megatron_fssdp.attach("fssdp", host=SimpleNamespace(model=Section(), mixed_precision=quantized))
    with pytest.raises(ConfigurationError, match="delayed"):
        megatron_fssdp.attach("fssdp", host=SimpleNamespace(model=quantized, mixed_precision=delayed))
    restarts = SimpleNamespace(enabled=True)
    with pytest.raises(ConfigurationError, match="got inprocess_restart"):
        megatron_fssdp.attach("fssdp", host=SimpleNamespace(model=Section(), inprocess_restart=restarts))
