"""What replicas take on a device is at most what the accounting says, and lives share memory as it says."""

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import numpy as np
import torch

from megatron_fssdp.planning.memory import ExpertOptimizer, HeldReplicas, expert_memory
from megatron_fssdp.planning.replica_life import PipelineStage, ReplicaLife
from megatron_fssdp.planning.transfer.message_size import message_rule
from megatron_fssdp.testing import run_ranks
from tests.support.training_preload import VIRTUAL_PRELOAD

from .. import case_run, layer_case, rank_layer
from ..case_run import CaseRun
from ..layer_case import LayerCase
from .test_virtual_devices import virtual_rank

WIDTH, LAYERS, EXPERTS = 64, 2, 4
ROUNDING_BYTES = 5 * 2**12
"""For small tensors, such as routing maps and tables of intervals."""
CASES = [
    LayerCase(
        "memory",
        life,
        placement="everywhere",
        num_layers=LAYERS,
        num_experts=EXPERTS,
        num_iterations=1,
        schedule=schedule,
        tokens=(8,) * 4,
        has_main_grad=True,
        dtype=torch.bfloat16,
        device="cuda",
    )
    for life, schedule in (
        (ReplicaLife.ITERATION, "FB"),
        (ReplicaLife.ITERATION, "FBFB"),
        (ReplicaLife.LAYER_PASS, "FBFB"),
        (ReplicaLife.MICRO_BATCH, "FBFB"),
    )
]


def peak_and_rest(case):
    """Most bytes of the device during the passes of an iteration, and bytes that are left afterwards."""
    with virtual_rank(case) as device:
        run = CaseRun(case, measure=False, check_plans=False)
        batches = [run.draw() for _ in range(case.schedule.count("F"))]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run.runtime.begin_iteration(len(batches))
        run.run_passes(case.schedule, batches)
        run.end()
        torch.cuda.synchronize()
        return device.memory.peak_bytes - before, torch.cuda.memory_allocated() - before


def peaks(rank, world_size):
    """Peaks and rests with replicas of all experts on all devices, and without replicas."""
    with ExitStack() as patches:
        for module, name in (
            *((case_run, name) for name in ("MODEL_DIM", "FFN_DIM")),
            (layer_case, "MODEL_DIM"),
            (rank_layer, "MODEL_DIM"),
        ):
            patches.enter_context(mock.patch.object(module, name, WIDTH))
        return [[peak_and_rest(run) for run in (case, replace(case, placement="owners"))] for case in CASES]


def test_replicas_take_at_most_what_the_accounting_says():
    peaks_SC = np.array(run_ranks(peaks, 4, preload=VIRTUAL_PRELOAD))
    for case, ((with_replicas, rest), (without, usual)) in zip(CASES, peaks_SC.max(axis=0), strict=True):
        of = expert_memory(
            held=HeldReplicas(
                case.life, PipelineStage((LAYERS,)), 2 * WIDTH * WIDTH, 2, case.schedule.count("F")
            ),
            slots_per_device=LAYERS * EXPERTS // 4,
            replicas={case.life: EXPERTS - EXPERTS // 4},
            owned_per_layer=EXPERTS // 4,
            gradient_bytes=4,
            optimizer=ExpertOptimizer(),
            expert_data_parallel_size=1,
            messages=message_rule(on_cuda=True),
            # An owner sends its expert to its neighbour and to the leader of the other node.
            most_received=2,
        )
        added = with_replicas - without
        # Autograd makes the gradients here, and all of a layer wait together.
        most = of.above_expert_parallelism_bytes + (EXPERTS - EXPERTS // 4) * 2 * WIDTH * WIDTH * 2
        assert added <= most + ROUNDING_BYTES, (case, added, of.describe())
        assert added >= of.replica_parameters_bytes, (case, added, of.describe())
        assert rest <= usual + 2 * ROUNDING_BYTES, (case, rest, usual)
