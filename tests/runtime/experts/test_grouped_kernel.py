"""The grouped kernel is used only on devices whose compute capability has it; capabilities are faked."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from megatron_fssdp.runtime.experts.expert_layout import ExpertWeights
from megatron_fssdp.runtime.experts.grouped_ffn import _grouped_matmul_pays
from megatron_fssdp.runtime.experts.grouped_kernel import (
    KERNEL,
    LOOP,
    device_has_grouped_kernel,
    expert_path,
)

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
EXPERTS = [ExpertWeights(torch.empty(16, 8), torch.empty(8, 16))] * 2


class Capabilities:
    """A machine whose devices have given capabilities; it counts how often the driver is asked."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.value, self.num_asked = (9, 0), 0
        patch.setattr(functional, "grouped_mm", torch._grouped_mm, raising=False)
        patch.setattr(torch.version, "hip", None)
        patch.setattr(torch.cuda, "get_device_capability", self.ask)

    def ask(self, device: torch.device) -> tuple[int, int]:
        self.num_asked += 1
        return self.value

    def set(self, major: int, minor: int) -> None:
        self.value = (major, minor)
        device_has_grouped_kernel.cache_clear()


@pytest.fixture
def capabilities(monkeypatch: pytest.MonkeyPatch) -> Any:
    device_has_grouped_kernel.cache_clear()
    yield Capabilities(monkeypatch)
    device_has_grouped_kernel.cache_clear()


def rows(**changes: Any) -> Any:
    """Takes the place of a tensor of four rows on a CUDA device, which this machine does not have."""
    fields = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (4, 8), "device": CUDA, **changes}
    return SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("capability", "has_kernel"),
    [
        ((7, 5), False),
        ((8, 0), False),
        ((8, 9), False),
        ((9, 0), True),
        ((10, 0), True),
        ((10, 3), True),
        ((11, 0), False),
        ((12, 0), False),
    ],
)
def test_only_hopper_and_data_center_blackwell_have_the_kernel(
    capability: tuple[int, int], has_kernel: bool, capabilities: Capabilities
) -> None:
    capabilities.set(*capability)
    assert _grouped_matmul_pays(rows(), EXPERTS) is has_kernel
    assert expert_path(CUDA, torch.bfloat16) == (KERNEL if has_kernel else LOOP)


def test_the_driver_is_asked_once_for_each_device(capabilities: Capabilities) -> None:
    for device in (CUDA, CUDA, torch.device("cuda", 1), CUDA):
        assert _grouped_matmul_pays(rows(device=device), EXPERTS)
    assert capabilities.num_asked == 2


def test_other_builds_types_and_shapes_take_the_loop(
    capabilities: Capabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes in (
        {"is_cuda": False, "device": CPU},
        {"dtype": torch.float32},
        {"shape": (0, 8)},
    ):
        assert not _grouped_matmul_pays(rows(**changes), EXPERTS)
    assert not _grouped_matmul_pays(rows(), EXPERTS[:1])
    assert expert_path(CUDA, torch.float32) == expert_path(CPU, torch.bfloat16) == LOOP
    device_has_grouped_kernel.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not _grouped_matmul_pays(rows(), EXPERTS)
    device_has_grouped_kernel.cache_clear()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delattr(functional, "grouped_mm")
    assert not _grouped_matmul_pays(rows(), EXPERTS)
