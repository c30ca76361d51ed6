"""Layers on virtual CUDA devices equal the reference, without a finding, and the host waits for nothing more.

A few cases run by default. ``pytest -m slow`` runs every kind of plan, with and without recompute.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fssdp.collectives.transfer_lanes import StreamTransfer
from megatron_fssdp.planning.cost.transfer_split import TransferSplit
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer.message_size import PipelinedMessages
from megatron_fssdp.runtime.layers import planned_layer
from megatron_fssdp.runtime.slots.autograd_points import in_backward
from megatron_fssdp.testing import RankError, run_ranks
from tests.support.virtual_cuda import VirtualDevice

from ..layer_case import LayerCase
from ..rank_layer import (
    VIRTUAL_PRELOAD,
    CaseRun,
    make_dispatcher,
    rank_groups,
    unknown_findings,
    virtual_rank,
)

WORLD = 4
SPLIT = TransferSplit(0.4, 0.7)
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
    case_of("split", split=SPLIT, schedule="FBFB", recompute="reentrant", num_iterations=1),
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
    case_of(
        f"split-{split.gather}-{split.reduce}-{recompute}", split=split, num_layers=3, recompute=recompute
    )
    for split in (SPLIT, TransferSplit(gather=0.01), TransferSplit(reduce=0.999))
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
        "split": {"split": SPLIT, "schedule": "FBFB", "placement": "random", "num_layers": 3},
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


# Host synchronizations.

COUNTED = (
    case_of("owners", placement="owners"),
    case_of("iteration"),
    case_of("layer-pass", LAYER_PASS),
    case_of("resident", RESIDENT),
    case_of("split", split=SPLIT),
    case_of("micro-batch", MICRO_BATCH),
    case_of("corrected", corrects=True),
)


@dataclass
class Waits:
    """Host synchronizations of the passes, with their places; the first iteration is left out.

    Attributes:
        first: Of first forward passes.
        again: Of recomputed forward passes.
        between: All others: of backward passes, and of what happens around the passes.
    """

    first: list[list[str]] = field(default_factory=list)
    again: list[list[str]] = field(default_factory=list)
    between: list[str] = field(default_factory=list)


def count_waits(rank: int, world_size: int, cases: Sequence[LayerCase]) -> tuple[Waits, dict[str, Waits]]:
    """Waits of Megatron's dispatcher alone, and of each case with recomputed passes."""
    found = {}
    for case in cases:
        with virtual_rank(case) as device:
            found[case.name] = _count_case(case, device)
    with virtual_rank(cases[0]) as device:
        alone = _count_megatron(cases[0], device)
    return alone, found


def _places(device: VirtualDevice, begin: int) -> list[str]:
    return [f"{event.what} at {event.place}" for event in device.host_syncs[begin:]]


def _noting(device: VirtualDevice, waits: Waits, forward: Any) -> Any:
    """A forward pass that notes the waits inside it."""

    def run(*arguments: Any) -> Tensor:
        begin = len(device.host_syncs)
        output: Tensor = forward(*arguments)
        (waits.again if in_backward() else waits.first).append(_places(device, begin))
        return output

    return run


def _count_case(case: LayerCase, device: VirtualDevice) -> Waits:
    run, waits = CaseRun(case, check_plans=False), Waits()
    # Ranks connect to each other in the first iteration, for which the host waits.
    for iteration in range(3):
        for layer in run.layers:
            if case.life is RESIDENT:
                layer.keep(run.strategy, iteration)  # type: ignore[arg-type]
        waits.first, waits.again = [], []
        batches = [run.draw() for _ in range(2)]
        run.runtime.begin_iteration(2)
        run.runtime.begin_passes()
        inputs = [[b.of_rank(x, run.rank).cuda() for x in (b.probs_L[0], b.map_L[0])] for b in batches]
        outputs = []
        begin = len(device.host_syncs)
        for batch, rest in zip(batches, inputs, strict=True):
            hidden = batch.of_rank(batch.hidden, run.rank).to("cuda", non_blocking=True).requires_grad_()
            run.layers[0].slots.launch(hidden)
            for layer in run.layers:
                forward = _noting(device, waits, layer.forward)
                hidden = hidden + checkpoint(
                    forward, hidden, *rest, use_reentrant=True, preserve_rng_state=False
                )
            outputs.append(hidden.sum())
        for output in outputs:
            output.backward()
        run.runtime.finish_gradients()
        run.runtime.end_passes()
        inside = [one for of_pass in (*waits.first, *waits.again) for one in of_pass]
        waits.between = _places(device, begin)
        for one in inside:
            waits.between.remove(one)
        run.runtime.end_iteration()
    return waits


def _count_megatron(case: LayerCase, device: VirtualDevice) -> Waits:
    groups, megatron = rank_groups(1, True, False, case.num_nodes)
    dispatcher = make_dispatcher(case.num_experts // WORLD, groups, megatron)
    run, waits = CaseRun(case), Waits()

    def forward(hidden: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        rows, row_probs = dispatcher.dispatch_preprocess(hidden.unsqueeze(1), routing_map, probs)
        rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
        rows, rows_P, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        assert rows_P.device.type == "cpu"
        rows = dispatcher.combine_preprocess((rows * row_probs.unsqueeze(1)).to(rows.dtype))
        output: Tensor = dispatcher.combine_postprocess(dispatcher.token_combine(rows)).squeeze(1)
        return output

    for _ in range(2):
        waits.first, waits.again = [], []
        batch = run.draw()
        leaves = [batch.of_rank(x, run.rank).cuda() for x in (batch.hidden, batch.probs_L[0], batch.map_L[0])]
        leaves[0].requires_grad_()
        run_noting = _noting(device, waits, forward)
        checkpoint(run_noting, *leaves, use_reentrant=True, preserve_rng_state=False).sum().backward()
    return waits


@functools.cache
def counted() -> list[tuple[Waits, dict[str, Waits]]]:
    """Waits of all ranks."""
    return run_ranks(count_waits, WORLD, COUNTED, preload=VIRTUAL_PRELOAD, timeout_s=180)


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_the_host_waits_only_where_megatrons_dispatcher_does(case: LayerCase) -> None:
    for alone, found in counted():
        (of_megatron,), (of_megatron_again,) = alone.first, alone.again
        waits = found[case.name]
        assert len(waits.first) == len(waits.again) == 2 * case.num_layers
        for of_pass, stock in (
            *((one, of_megatron) for one in waits.first),
            *((one, of_megatron_again) for one in waits.again),
        ):
            ours = [place for place in of_pass if place not in stock]
            if case.life is MICRO_BATCH:
                # One wait for the counts, and none of the dispatcher's is missing.
                assert len(of_pass) == len(stock) + 1, of_pass
            elif case.corrects:
                assert len(of_pass) <= len(stock) + 1, of_pass
            else:
                assert len(of_pass) == len(stock), ours
        assert not waits.between, waits.between
