"""The CPU runtime is requested or detected, is idempotent, and stays off in a GPU run."""

from argparse import Namespace

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.cpu import cpu_runtime
from megatron_fssdp.testing import run_ranks
from megatron_fssdp.testing.parallel_state import MEGATRON_PRELOAD


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


def test_cuda_calls_run_on_the_cpu() -> None:
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


def test_gathers_and_reduce_scatters_accept_different_sizes() -> None:
    assert run_ranks(_exchange_different_sizes, 3, preload=MEGATRON_PRELOAD) == [True] * 3


def _exchange_different_sizes(rank: int, world_size: int) -> bool:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for sizes in ([3, 0, 2], [0, 0, 1], [2, 2, 2]):
            own = torch.full((sizes[rank], 2), rank + 1).to(dtype)
            wanted = [torch.full((size, 2), source + 1).to(dtype) for source, size in enumerate(sizes)]
            whole = torch.zeros(sum(sizes), 2, dtype=dtype)
            dist.all_gather(list(whole.split(sizes)), own)
            assert torch.equal(whole, torch.cat(wanted))

            parts = list((whole * (rank + 1)).split(sizes))
            summed = torch.zeros(sizes[rank], 2, dtype=dtype)
            dist.reduce_scatter(summed, parts)
            assert torch.equal(summed, own * 6)
    return True
