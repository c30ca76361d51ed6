"""The runtime's device code on a real GPU. With ``--virtual-gpu``, most of it runs on a virtual device.

Several ranks share the card (``devtools.one_card``), so one GPU is enough for replicas.
"""

import pytest
import torch

from devtools.one_card import CardGroups
from devtools.virtual_cuda.posing.patches import Patches
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.runtime.clocks.layer_stopwatch import LayerStopwatch
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout
from megatron_fssdp.runtime.slots.replica_slots import ReplicaSlots
from megatron_fssdp.testing import run_ranks

from .case_run import CaseRun
from .layer_case import LayerCase

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def test_memory_of_replicas_comes_and_goes():
    small = torch.ones(8, 8, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    torch.mm(small, small).sum().backward()  # cuBLAS takes a workspace in either pass, and keeps it
    del small
    before = torch.cuda.memory_allocated()
    shapes = torch.Size((512, 256)), torch.Size((256, 512))
    slots = ReplicaSlots(ExpertLayout(shapes, torch.bfloat16, 2), CUDA)
    slots.hold([2, 5])
    assert torch.cuda.memory_allocated() == before
    slots.open_weights()
    for flat in slots.weights().values():
        flat.fill_(1.0)
    x = torch.ones(3, 256, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    y = torch.nn.functional.linear(x, slots.parameters(5)[0]).float().sum()
    slots.close_weights()
    slots.open_weights()
    for flat in slots.weights().values():
        flat.fill_(2.0)  # the weights were gathered again
    slots.open_sums()
    assert torch.cuda.memory_allocated() - before >= 2 * 512 * 512 * (2 + 4)
    y.backward()
    assert x.grad is not None
    assert x.grad.eq(1024.0).all()
    assert slots.layout.unpack(slots.sums()[5])[0].eq(3.0).all()
    slots.close_weights()
    slots.close_sums()
    del x, y
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu(real=True)
def test_kernels_are_timed_on_the_device():
    x = torch.randn(4096, 4096, device=CUDA)
    torch.mm(x, x)
    torch.cuda.synchronize()
    watch, begin, end = LayerStopwatch(), torch.cuda.Event(True), torch.cuda.Event(True)
    begin.record()
    watch.layer_begins(CUDA)
    for _ in range(50):
        torch.mm(x, x)
    watch.reach("dispatch", x)
    watch.reach("experts", x)
    for _ in range(50):
        torch.mm(x, x)
    watch.reach("combine", x)
    end.record()
    torch.cuda.synchronize()
    whole_s = begin.elapsed_time(end) / 1e3
    assert 0.4 * whole_s < watch.before_s() < 0.6 * whole_s
    assert 0.4 * whole_s < watch.experts_s() < 0.6 * whole_s


CASES = tuple(
    LayerCase(name, life, **{"schedule": "FFBB", "device": "cuda", "has_main_grad": True, **options})
    for name, life, options in (
        ("iteration", ReplicaLife.ITERATION, {"early": 0.4, "num_layers": 3}),
        ("layer-pass", ReplicaLife.LAYER_PASS, {"recompute": "reentrant", "num_layers": 3}),
        ("micro-batch", ReplicaLife.MICRO_BATCH, {}),
        ("resident", ReplicaLife.RESIDENT, {}),
        ("moved", ReplicaLife.ITERATION, {"moves": True, "repeats": True}),
        ("bf16", ReplicaLife.ITERATION, {"dtype": torch.bfloat16}),
    )
)
PUTS = (LayerCase("puts", ReplicaLife.LAYER_PASS, schedule="FFBB", device="cuda", num_layers=3, puts=True),)


def run_cases(rank, world_size, cases):
    with Patches() as patches:
        CardGroups().install(patches)
        return {case.name: max(CaseRun(case).run().errors.values()) for case in cases}


@pytest.mark.gpu(real=True)
def test_layers_of_ranks_on_one_card_equal_the_reference():
    # Megatron's import asks for the number of GPUs, after which CUDA refuses to start in a forked process.
    for errors in run_ranks(run_cases, 4, CASES, preload=()):
        assert errors.pop("bf16") <= 5e-2
        assert max(errors.values()) <= 1e-10


@pytest.mark.gpu(real=True)
def test_weights_put_into_slots_on_one_card_equal_the_reference():
    # torch refuses two ranks on one device otherwise.
    env = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    for errors in run_ranks(run_cases, 4, PUTS, env=env, preload=()):
        assert errors["puts"] <= 1e-10
