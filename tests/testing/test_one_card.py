from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from devtools import one_card
from devtools.virtual_cuda.posing.patches import Patches
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.testing import run_ranks
from tests.runtime.case_run import CaseRun
from tests.runtime.layer_case import LayerCase
from tests.support.training_preload import on_layer_ranks, on_plain_ranks

from .virtual_cuda.test_nccl_groups import RESULTS, all_calls

CASES = (
    LayerCase("iteration", ReplicaLife.ITERATION, early=0.4, schedule="FFBB"),
    LayerCase("layer-pass", ReplicaLife.LAYER_PASS, recompute="reentrant"),
    LayerCase("micro-batch", ReplicaLife.MICRO_BATCH, moves=True),
    LayerCase("resident", ReplicaLife.RESIDENT),
)


@contextmanager
def on_one_card():
    with Patches() as patches:
        one_card.CardGroups(poses=False).install(patches)
        yield


@on_plain_ranks(2)
def test_every_call_moves_the_data_that_nccl_would_move():
    rank = dist.get_rank()
    with on_one_card():
        assert all_calls(rank, "cpu") == {name: values[rank] for name, values in RESULTS.items()}


@on_plain_ranks(2)
def test_calls_return_at_once_and_results_come_with_the_wait():
    """Rank 1 comes after rank 0 has looked, so nothing can be complete before rank 0 waits."""
    store, rank = distributed_c10d._get_default_store(), dist.get_rank()
    with on_one_card():
        x, y = torch.ones(2), torch.full((2,), float(rank))
        if rank == 1:
            store.get("looked")
        works = [dist.all_reduce(x, async_op=True), dist.broadcast(y, 1, async_op=True)]
        assert rank == 1 or not works[1].is_completed()
        store.set("looked", "")
        for work in works:
            work.wait()
        assert [*x.tolist(), *y.tolist()] == [2, 2, 1, 1]


@on_layer_ranks(4)
def test_layers_equal_the_reference():
    with on_one_card():
        for case in CASES:
            assert max(CaseRun(case).run().errors.values()) <= 1e-10, case.name


SCRIPT = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("nccl")
number = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(number)
seen = f"{dist.get_backend()} {number.item()} {os.environ['LOCAL_RANK']} {sys.argv[1]}"
open(f"{sys.argv[2]}/{os.environ['RANK']}.txt", "w").write(seen)
dist.destroy_process_group()
"""


def run_script(rank, world_size, words, folder):
    """As ``python -m devtools.one_card WORDS…`` under torchrun."""
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.destroy_process_group()
    ranks = {"store": store, "rank": rank, "world_size": world_size}
    started = mock.patch.object(
        distributed_c10d, "init_process_group", partial(dist.init_process_group, **ranks)
    )
    with started, pytest.raises(SystemExit) as ended:
        one_card.main(words)
    return ended.value.code


def test_a_script_runs_with_its_arguments(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert not any(run_ranks(run_script, 2, [str(script), "--size", str(tmp_path)], tmp_path))
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["nccl 3.0 0 --size"] * 2


@on_plain_ranks(2)
def test_an_error_of_gloo_is_raised_by_the_wait():
    """A reduction that gloo does not have."""
    with on_one_card():
        work = dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BAND, async_op=True)
        with pytest.raises(RuntimeError, match=r"."):
            work.wait()
