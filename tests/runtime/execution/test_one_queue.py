"""Layers on a virtual CUDA device with one queue: transfers issue their messages at points of the program."""

from dataclasses import replace

import pytest

from megatron_fssdp.collectives.stream_lane import StreamTransfer
from megatron_fssdp.planning.cost.transfer_split import TransferSplit
from megatron_fssdp.planning.transfer.message_size import PipelinedMessages
from megatron_fssdp.runtime.execution import layer_iteration
from megatron_fssdp.testing import run_ranks

from ..layer_case import LayerCase
from ..virtual_layer import VirtualResult, run_layers, run_stacks

WORLD = 4
SMALL = PipelinedMessages(16, fewest=4, most=6)
"""Experts of the cases are small. By this rule they travel in several messages nevertheless."""

QUEUED = LayerCase("once", transfers="once", schedule="FFBB", placement="everywhere", one_queue=True)
LAYERS = (
    QUEUED,
    replace(QUEUED, name="owns-nothing", owners=(0, 0, 2, 2, 2, 3, 3, 0), placement="random"),
    replace(QUEUED, name="rematerialized", transfers="rematerialized", recompute="reentrant"),
    replace(QUEUED, name="each", transfers="each", num_nodes=2),
    replace(QUEUED, name="resident", transfers="resident", schedule="FBFB"),
    replace(QUEUED, name="smart-schedule", group_size=1, num_nodes=2),
    replace(QUEUED, name="calibrated", calibrated=True, recompute="non_reentrant", placement="random"),
)
STACKS = ((replace(QUEUED, name="split", schedule="FBFB", placement="random"), TransferSplit(0.4, 0.7)),)


def run(
    rank: int,
    world_size: int,
    layers: tuple[LayerCase, ...],
    stacks: tuple[tuple[LayerCase, TransferSplit], ...],
) -> tuple[dict[str, VirtualResult], int]:
    """Results of the cases, and the number of batches that were issued at points after a transfer's start."""
    later = 0
    issue = StreamTransfer.issue

    def counting(transfer: StreamTransfer) -> None:
        nonlocal later
        before = transfer.num_issued
        issue(transfer)
        later += transfer.num_issued - before if before else 0

    StreamTransfer.issue = counting  # type: ignore[method-assign]
    layer_iteration.message_rule = lambda on_cuda: SMALL  # type: ignore[attr-defined]
    found = run_layers(rank, world_size, layers) | run_stacks(rank, world_size, stacks)
    return found, later


@pytest.mark.slow
def test_messages_at_points_change_no_number_and_make_no_race() -> None:
    for results, later in run_ranks(run, WORLD, LAYERS, STACKS, timeout_s=300):
        assert len(results) == len(LAYERS) + len(STACKS)
        assert later > 0
        for name, result in results.items():
            assert result.findings == [], name
            assert result.num_tensors > 0
            # Sums over the rows of an expert can have another order than on the CPU.
            assert result.difference < 1e-12, name
