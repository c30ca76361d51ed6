"""The CPU runtime: asked for, detected, idempotent, and off on a GPU run."""

import pytest
import torch

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter import cpu_runtime
from megatron_fssdp.testing import run_ranks
from megatron_fssdp.testing.parallel_state import MEGATRON_PRELOAD


def test_device_variable(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_nothing_is_touched_on_a_gpu_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_runtime.DEVICE_VARIABLE, "cuda")
    before = {
        name: getattr(torch.cuda, name) for name in ("Stream", "Event", "current_device", "manual_seed")
    }
    type_name = torch.zeros(1).type()
    assert not cpu_runtime.install()
    assert {name: getattr(torch.cuda, name) for name in before} == before
    assert torch.zeros(1).type() == type_name == "torch.FloatTensor"


def test_cuda_calls_mean_the_cpu() -> None:
    assert run_ranks(_use_cuda_calls, 1, preload=MEGATRON_PRELOAD) == [True]


def _use_cuda_calls(rank: int, world_size: int) -> bool:
    from torch.utils.checkpoint import checkpoint

    assert cpu_runtime.install(), "idempotent"
    assert not torch.cuda.is_available()
    for tensor in (
        torch.zeros(2, device="cuda"),
        torch.empty(2, device=torch.cuda.current_device()),
        torch.tensor([1.0], device=torch.device("cuda", 0)),
        torch.zeros(2).cuda(),
        torch.zeros(2).to("cuda:0"),
        torch.zeros(2).to(device="cuda", dtype=torch.float64),
        torch.zeros(2).new_empty(3, device="cuda"),
        torch.zeros(2, pin_memory=True),
    ):
        assert tensor.device.type == "cpu"
    assert torch.zeros(2).to(torch.float64).dtype is torch.float64
    assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
    with torch.cuda.stream(torch.cuda.Stream()):
        event = torch.cuda.current_stream().record_event()
    event.synchronize()

    # Python code inside torch.autograd.backward, as in a recomputed forward.
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.ones(2, device="cuda")

    x = torch.ones(2, requires_grad=True)
    y = checkpoint(forward, x * 1, use_reentrant=True)
    torch.autograd.backward(y.sum())
    return torch.equal(x.grad, torch.ones(2))
