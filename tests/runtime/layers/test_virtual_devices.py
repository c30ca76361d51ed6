"""Layers on virtual CUDA devices equal the reference, without a finding, and the host waits for nothing more.

A few cases of ``test_slot_layer.py`` run by default. ``pytest -m slow`` runs every kind of plan.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch

from devtools.virtual_cuda import FindingKind, virtual_cuda
from devtools.virtual_cuda.programs.known_findings import explained
from megatron_fssdp.collectives.transfer_lanes import StreamTransfer
from megatron_fssdp.planning.transfer.message_size import PipelinedMessages
from megatron_fssdp.runtime.layers import local_layer
from megatron_fssdp.testing import run_ranks
from tests.support.training_preload import VIRTUAL_PRELOAD

from ..case_run import CaseRun
from ..rank_layer import rank_groups
from .test_slot_layer import FOUR

# Non-reentrant recomputation asks torch for a real device.
CASES = tuple(
    replace(case, device="cuda", has_main_grad=True)
    for case in FOUR
    if case.recompute != "non_reentrant" and case.driven
)
QUEUED = tuple(
    replace(case, name=f"queued-{case.name}", one_queue=True)
    for case in CASES
    if case.name.endswith(("-everywhere", "-owns-nothing")) or case.name in ("split", "corrected")
)
CHANGES = {
    "LAYER_PASS-reentrant": {},
    "corrected": {},
    "queued-ITERATION-everywhere": {"schedule": "FBE"},
    "MICRO_BATCH-late": {},
    "split-recomputed": {},
    "ITERATION-moving": {"num_iterations": 2},
    "RESIDENT-repeated": {"late": True, "schedule": "FFBB"},
    "mixed-bf16": {"num_layers": 2},
}
"""The cases that run by default, with fewer iterations."""
ON_FOUR = ("corrected", "queued-ITERATION-everywhere")  # with several ranks in each of two nodes
DEFAULT = [
    replace(case, **{"num_iterations": 1, **CHANGES[case.name]})
    for case in (*CASES, *QUEUED)
    if case.name in CHANGES
]


@dataclass(frozen=True)
class CaseResult:
    """One rank's errors and findings, and at how many points after a transfer's start batches were issued."""

    errors: dict[str, float]
    findings: list[str]
    num_later: int


def run_cases(rank, world_size, cases):
    """Run cases on the virtual device. With one queue, experts travel in several small messages."""
    later, issue, results = [0], StreamTransfer.issue, {}

    def counting(transfer, **how):
        later[0] += not how and transfer.has_batches and transfer.timer.begin is not None
        issue(transfer, **how)

    small = PipelinedMessages(16, 16, most_bytes=48)
    for case in cases:
        later[0] = 0
        with ExitStack() as patches:
            device = patches.enter_context(virtual_rank(case))
            patches.enter_context(mock.patch.object(StreamTransfer, "issue", counting))
            if case.one_queue:
                patches.enter_context(mock.patch.object(local_layer, "message_rule", return_value=small))
            result = CaseRun(case).run()
            torch.cuda.synchronize()
        results[case.name] = CaseResult(result.errors, unknown_findings(device), later[0])
    return results


@contextmanager
def virtual_rank(case):
    """A virtual CUDA device for a case; groups exist before it, and Megatron's stream belongs to it."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    rank_groups(case.peers, case.overlaps, case.one_queue, case.num_nodes)
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None
    with virtual_cuda() as device:
        yield device


def unknown_findings(device):
    """Findings of a device but for the known ones in Megatron's own code.

    On a rank without rows, autograd itself makes the gradient of the probabilities. It makes it on the CPU,
    whose tensors pose as CUDA tensors here.
    """
    place = "megatron/core/tensor_parallel/mappings.py"
    findings = [
        finding
        for finding in explained(device.findings)[0]
        if not (finding.kind is FindingKind.NCCL_CPU and finding.place.startswith(place))
    ]
    return [str(finding) for finding in findings]


def check(cases, world_size=4):
    limit_s = 900 + 20 * len(cases)
    by_rank = run_ranks(run_cases, world_size, cases, preload=VIRTUAL_PRELOAD, timeout_s=limit_s)
    for case in cases:
        for rank, result in enumerate(results[case.name] for results in by_rank):
            assert not result.findings, f"{case.name}, rank {rank}: " + "\n".join(result.findings)
            worst = max(result.errors.values(), default=0)
            assert worst <= (5e-2 if case.dtype is torch.bfloat16 else 1e-10), (case.name, result.errors)
            assert not case.one_queue or result.num_later, case.name


def test_layers_equal_the_reference_without_a_finding():
    check([case for case in DEFAULT if case.name in ON_FOUR])
    check([case for case in DEFAULT if case.name not in ON_FOUR], world_size=2)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("cases", [CASES, QUEUED], ids=["lanes", "one queue"])
def test_every_kind_of_plan_equals_the_reference_without_a_finding(cases):
    check(cases)
