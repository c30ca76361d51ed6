"""Layers on virtual CUDA devices equal the reference, without a finding, and the host waits for nothing more.

A few cases run by default. ``pytest -m slow`` runs every kind of plan, with and without recompute.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fssdp.collectives.transfer_lanes import StreamTransfer
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer.message_size import PipelinedMessages
from megatron_fssdp.runtime.layers import planned_layer
from megatron_fssdp.testing import RankError, run_ranks

from ..layer_case import LayerCase
from ..rank_layer import (
    VIRTUAL_PRELOAD,
    CaseRun,
    unknown_findings,
    virtual_rank,
)

WORLD = 4
ITERATION, LAYER_PASS, MICRO_BATCH, RESIDENT = (
    ReplicaLife.ITERATION,
    ReplicaLife.LAYER_PASS,
    ReplicaLife.MICRO_BATCH,
    ReplicaLife.RESIDENT,
)


def case_of(name: str, life: ReplicaLife = ITERATION, **options: Any) -> LayerCase:
    return LayerCase(name, life, **{"schedule": "FFBB", "device": "cuda", "has_main_grad": True, **options})


SOME = (
    case_of("iteration", num_iterations=1),
    case_of("layer-pass", LAYER_PASS, recompute="reentrant", num_iterations=1),
    case_of("micro-batch", MICRO_BATCH, num_iterations=1),
    case_of("resident", RESIDENT, num_iterations=1),
    case_of("split", early=0.4, schedule="FBFB", recompute="reentrant", num_iterations=1),
    case_of("corrected", corrects=True, num_iterations=1),
    case_of("repeated", repeats=True, moves=True),
)
ALL = tuple(
    case_of(f"{life.name}-{recompute}-{'-'.join(options)}", life, recompute=recompute, **options)
    for life in ReplicaLife
    if life is not ReplicaLife.SELECTED
    for recompute in (None, "reentrant")
    for options in (
        {},
        {"num_layers": 3, "schedule": "FFBFBB"},
        {"owners": (0, 0, 2, 2, 2, 3, 3, 0)},
        {"overlaps": False},
        {"routing": "dropped"},
        {"late": True},
        {"repeats": True},
        {"dtype": torch.bfloat16},
    )
) + tuple(
    case_of(f"split-{early}-{recompute}", early=early, num_layers=3, recompute=recompute)
    for early in (0.01, 0.4, 0.999)
    for recompute in (None, "reentrant")
)
QUEUED = tuple(
    case_of(f"queued-{name}", one_queue=True, **{"placement": "everywhere", **options})
    for name, options in {
        "iteration": {},
        "owns-nothing": {"owners": (0, 0, 2, 2, 2, 3, 3, 0), "placement": "replicas_only"},
        "layer-pass": {"life": LAYER_PASS, "recompute": "reentrant"},
        "micro-batch": {"life": MICRO_BATCH, "num_iterations": 1},
        "resident": {"life": RESIDENT, "schedule": "FBFB"},
        "split": {"early": 0.4, "schedule": "FBFB", "placement": "random", "num_layers": 3},
        "corrected": {"corrects": True, "placement": "random", "num_iterations": 1},
    }.items()
)


@dataclass(frozen=True)
class Found:
    """One rank's errors and findings, and how many batches were issued at points after a transfer's start."""

    errors: dict[str, float]
    findings: list[str]
    num_later: int


def run_cases(rank: int, world_size: int, cases: Sequence[LayerCase]) -> dict[str, Found]:
    """Run cases on the virtual device. With one queue, experts travel in several small messages."""
    later, issue, found = [0], StreamTransfer.issue, {}

    def counting(transfer: StreamTransfer) -> None:
        before = transfer.num_issued
        issue(transfer)
        later[0] += transfer.num_issued - before if before else 0

    small = PipelinedMessages(16, fewest=4, most=6)
    for case in cases:
        later[0] = 0
        rules = mock.patch.object(planned_layer, "message_rule", return_value=small)
        with virtual_rank(case) as device, mock.patch.object(StreamTransfer, "issue", counting):
            if case.one_queue:
                with rules:
                    result = CaseRun(case).run()
            else:
                result = CaseRun(case).run()
            torch.cuda.synchronize()
        found[case.name] = Found(result.errors, unknown_findings(device), later[0])
    return found


@functools.cache
def outcomes(cases: Sequence[LayerCase]) -> list[dict[str, Found]] | RankError:
    """Results of all cases from one start of the ranks; an error is kept as well."""
    try:
        return run_ranks(run_cases, WORLD, cases, preload=VIRTUAL_PRELOAD, timeout_s=60 + 5 * len(cases))
    except RankError as error:
        return error


def check(case: LayerCase, cases: Sequence[LayerCase]) -> None:
    results = outcomes(cases)
    if isinstance(results, RankError):
        raise results
    for rank, of_case in enumerate(results):
        found = of_case[case.name]
        assert not found.findings, f"rank {rank}: " + "\n".join(found.findings)
        assert max(found.errors.values()) <= (5e-2 if case.dtype is torch.bfloat16 else 1e-10), found.errors
        assert not case.one_queue or found.num_later


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_layers_equal_the_reference_without_a_finding(case: LayerCase) -> None:
    check(case, SOME)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ALL + QUEUED, ids=lambda case: case.name)
def test_every_kind_of_plan_equals_the_reference_without_a_finding(case: LayerCase) -> None:
    check(case, QUEUED if case.one_queue else ALL)


def test_messages_at_points_of_one_queue_change_no_number() -> None:
    check(QUEUED[0], QUEUED[:1])
