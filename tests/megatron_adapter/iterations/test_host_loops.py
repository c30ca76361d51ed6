"""Under the loops of all hosts, strategies have stock's losses and gradients, and plans from loads."""

import numpy as np
import pytest

from megatron_fssdp.megatron_adapter.wrapping import wrap
from megatron_fssdp.records.loads import read_loads
from megatron_fssdp.runtime.layers import layer_planner
from tests.support.training_preload import run_megatron_ranks

from ..training_run import slow
from .host_loops import LOOPS, assert_equal, train_under, trained

FSSDP = ("fssdp", {"slots": 2, "overlap_degree": 3})
MOVING = ("fssdp", {"slots": 2, "overlap_degree": 3, "reshard_interval": 2})
ALL = [FSSDP, MOVING, ("quota", {"slots": 2}), ("smartmoe", {"reshard_interval": 2})]
ALL += [(name, {}) for name in ("ep", "prophet", "fastermoe", "auto")]
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def test_loops_train_as_stock_megatron():
    compare({loop: OVERLAPS if loop == "nemo" else {} for loop in LOOPS}, [MOVING])


@pytest.mark.slow
@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop != "offloading"])
def test_a_loop_trains_as_stock_megatron_under_all_strategies(loop):
    compare({loop: {} if loop == "nemo" else OVERLAPS}, ALL)


@pytest.mark.parametrize("loop", ["by_hand", *slow([loop for loop in LOOPS if loop != "by_hand"])])
def test_none_records_the_loads_of_a_loop(loop, tmp_path):
    names = ("none", "ep")
    strategies = [(name, {"record_dir": str(tmp_path / name)}) for name in names]
    for of_loops in run_megatron_ranks(train_under, 2, {loop: {}}, strategies, ep=2):
        stock, recorded, _ = of_loops[loop]
        assert (recorded.losses, recorded.norms) == (stock.losses, stock.norms)
        assert recorded.gradients == stock.gradients
    loads, wanted = (read_loads(tmp_path / name) for name in names)
    assert loads.iterations.tolist() == wanted.iterations.tolist()
    np.testing.assert_array_equal(loads.counts_ILDE[0], wanted.counts_ILDE[0])
    tokens_IL = loads.counts_ILDE.sum(axis=(2, 3))
    np.testing.assert_array_equal(tokens_IL, wanted.counts_ILDE.sum(axis=(2, 3)))


def train_measured(rank, world_size):
    served = []
    note = lambda plan, *given: served.append(given[-1]) or plan(*given)  # noqa: E731
    wrap(layer_planner, "plan_after_gate", note)
    strategy = "fssdp", {"slots": 2, "planned_from": "first"}
    return trained(strategy, LOOPS["by_hand"], num_iterations=4).micro_batches, served[-1]


def test_a_loop_without_a_schedule_has_the_micro_batches_that_were_seen():
    assert run_megatron_ranks(train_measured, 2, ep=2) == [(3, 3)] * 2


def compare(loops, strategies):
    """Loops by name, with options of DDP."""
    of_ranks = run_megatron_ranks(train_under, 2, loops, strategies, ep=2)
    for loop in loops:
        ranks = [of_loops[loop] for of_loops in of_ranks]
        assert_equal(ranks, [f"{name}, {loop}" for name, _ in strategies])
        for _, *others in ranks:
            for (name, settings), run in zip(strategies, others, strict=True):
                if name == "fssdp":
                    assert run.replicas[-1] > 0
                    assert run.num_known > 0
                    assert any(run.moved) == ("reshard_interval" in settings)  # slime moves them back
