"""Counts of single micro-batches reach every rank's host as they were routed."""

from unittest import mock

import numpy as np
import pytest
import torch

from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.runtime.layers import slot_counts
from tests.support.training_preload import on_layer_ranks

from ..case_run import CaseRun
from ..layer_case import LayerCase

# The drawn plans of these cases have share tables and exact shares, several numbers of slots and none.
CASES = [
    LayerCase("rows, recomputed", recompute="reentrant", routing="dropped"),
    LayerCase("rows, released", ReplicaLife.LAYER_PASS, recompute="reentrant"),
    LayerCase("rows, on the host", ReplicaLife.MICRO_BATCH, recompute="reentrant"),
    LayerCase("rows, owners", placement="owners"),
]


def rows_of(run):
    """Of each layer, the micro-batches of the last iteration."""
    like = [layer.slots.history.iterations_like(99) for layer in run.layers]
    return [[(counts_DE // len(of_layer)).tolist() for counts_DE in of_layer] for of_layer in like]


def iterate(run, num_batches):
    """Run an iteration in which layer 1 runs twice in the second micro-batch; what each layer has routed."""
    runtime, wanted = run.runtime, [[] for _ in run.layers]
    runtime.begin_iteration(1)  # More come than are announced.
    for number in range(num_batches):
        batch = run.draw()
        output, _, probs_L = run.forward(batch)
        for of_layer, map_TE in zip(wanted, batch.map_L, strict=True):
            of_layer.append(run.counts_DE(map_TE, batch).tolist())
        if number == 1:
            again_TE = batch.map_L[1]
            output = output + run.layers[0].forward(output, probs_L[0], batch.of_rank(again_TE, run.rank))
            wanted[0].append(run.counts_DE(again_TE, batch).tolist())
        with runtime.evaluation(), torch.no_grad():
            run.forward(run.draw())
        output.sum().backward()
    loads = run.end()
    for load, of_layer in zip(loads, wanted, strict=True):
        assert load.counts_DE.tolist() == np.sum(of_layer, axis=0).tolist()
    return wanted


def check_rows(*cases):
    for case in cases:
        run = CaseRun(case)
        for num_batches in (2, 1, 3):
            assert iterate(run, num_batches) == rows_of(run), (case.name, num_batches)


@on_layer_ranks(2)
def test_rows_arrive_as_they_were_routed():
    check_rows(*CASES)


@on_layer_ranks(4)
def test_rows_of_ranks_that_share_experts_are_added():
    check_rows(LayerCase("rows, peers", peers=2))


@on_layer_ranks(2)
def test_more_passes_than_rows_are_added_in_turn():
    with mock.patch.object(slot_counts, "MOST_ROWS", 2):
        run = CaseRun(LayerCase("rows", num_nodes=1))

    def mean(passes, number):
        """Of the passes in a row; all of them together are the iteration."""
        in_row = passes[number % 2 :: 2]
        return (np.sum(in_row, axis=0) // len(in_row)).tolist()

    wanted = iterate(run, 3)
    assert rows_of(run) == [[mean(passes, number) for number in range(len(passes))] for passes in wanted]
    # As where a CUDA graph has counted, only sums are known.
    run.layers[0].slots.counts._most_rows = 1
    of_first, of_second = iterate(run, 2)
    assert rows_of(run) == [[np.sum(of_first, axis=0).tolist()], of_second]


@on_layer_ranks(2)
def test_ranks_with_other_numbers_of_passes_stop():
    """One rank has one pass of layer 2 more, which no collective has noticed."""
    for num_before in (0, 1):
        run = CaseRun(CASES[-1])
        for _ in range(num_before):
            iterate(run, 3)
        run.runtime.begin_iteration(1, 7)
        run.forward(run.draw())[0].sum().backward()
        slots = run.layers[1].slots
        if run.rank == 1:
            no_tokens = torch.zeros((0, slots.local.context.num_experts), dtype=torch.bool)
            slots.counts.open(slots.passes.shared, no_tokens)
        run.runtime.finish_gradients()
        run.runtime.end_passes()
        with pytest.raises(RuntimeError, match=r"passes or slots of iteration 7.*on ranks \[1\] of 2"):
            run.runtime.end_iteration()
