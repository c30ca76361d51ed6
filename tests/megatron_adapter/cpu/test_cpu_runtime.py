"""The CPU runtime is requested or detected, and stays off in a GPU run. All trainings of the tests use it."""

from argparse import Namespace

import pytest
import torch

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.cpu import cpu_runtime


def test_the_device_variable_selects_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not cpu_runtime.requested()
    monkeypatch.setenv(cpu_runtime.DEVICE_VARIABLE, "cpu")
    assert cpu_runtime.requested()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(cpu_runtime.DEVICE_VARIABLE)
    assert cpu_runtime.requested()
    monkeypatch.setenv(cpu_runtime.DEVICE_VARIABLE, "tpu")
    with pytest.raises(ConfigurationError, match="'tpu'"):
        cpu_runtime.requested()


def test_nothing_is_replaced_in_a_gpu_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_runtime.DEVICE_VARIABLE, "cuda")
    with pytest.raises(ConfigurationError, match="torch finds no CUDA device"):
        cpu_runtime.install()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = {
        name: getattr(torch.cuda, name) for name in ("Stream", "Event", "current_device", "manual_seed")
    }
    type_name = torch.zeros(1).type()
    assert not cpu_runtime.install()
    assert {name: getattr(torch.cuda, name) for name in before} == before
    assert torch.zeros(1).type() == type_name == "torch.FloatTensor"
    cpu_runtime.check_arguments(Namespace(context_parallel_size=2))
