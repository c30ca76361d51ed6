from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_fssdp.runtime.experts import compute_probe
from megatron_fssdp.runtime.experts.compute_probe import (
    PASSES,
    LayerShape,
    attention_flops_per_s,
    device_memory_bytes,
    expert_flops_per_s,
)

CPU = torch.device("cpu")
SHAPE = LayerShape(32, 48, 3, 16, False, 4, 8, 2, torch.float32)


@pytest.fixture
def counted(monkeypatch):
    """Make a pass take as many seconds as it has FLOPs, so that a correct count gives 1 FLOP/s."""

    def flops(action, device):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            action()
        return float(counter.get_total_flops())

    monkeypatch.setattr(compute_probe, "elapsed_s", flops)


@pytest.mark.parametrize("gated", [False, True])
def test_expert_flops_equal_the_formula(counted, gated):
    assert expert_flops_per_s(replace(SHAPE, gated=gated), CPU, 1) == pytest.approx(1.0)


def test_attention_flops_equal_the_formula(counted):
    """Fused attention's backward pass recomputes the scores, which is not useful work; count forward only."""
    assert attention_flops_per_s(SHAPE, CPU, 1) == pytest.approx(1.0)
    assert PASSES * SHAPE.attention_flops == 3 * 16 * (4 * 2 * 32 * 32 + 2 * 2 * 8 * 32)


def test_ranks_share_the_memory_of_their_machine():
    whole = device_memory_bytes(CPU, 1)
    assert whole > 1 << 28
    assert device_memory_bytes(CPU, 4) == whole // 4
