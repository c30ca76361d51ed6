"""Expert-parallel groups with copies of the same experts run other numbers of micro-batches, also none."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch.distributed as dist

from megatron_fssdp.records.loads import read_loads
from megatron_fssdp.records.metrics import read_metrics
from megatron_fssdp.records.placements import read_placements
from tests.support.training_preload import run_megatron_ranks

from ..training_run import slow
from .host_loops import BATCH, LENGTH, assert_equal, trained
from .test_host_loops import MOVING

ITERATIONS = 5
# The second one moves experts by measured costs.
STRATEGIES = [("flexmoe", {"placement_interval": 1, "window": 1}), ("fssdp", {"reshard_interval": 2})]
MORE = [("auto", {"choice_interval": 2}), ("smartmoe", {"reshard_interval": 2}), ("quota", {"slots": 2})]
MORE += [(name, {}) for name in ("ep", "prophet", "fastermoe")]


def numbers_of(seed):
    """Micro-batches of both groups in each iteration; at least one group has some."""
    drawn = np.random.default_rng(seed).integers(0, 4, (ITERATIONS, 2))
    drawn[drawn.sum(axis=1) == 0, seed % 2] = 1
    return [*drawn.tolist()]


def iterate(host, iteration, seed):
    """One iteration: by a schedule or without, and now and then one group evaluates before, one after."""
    group = dist.get_rank() // 2
    number = numbers_of(seed)[iteration][group]
    evaluates = iteration % 3 == 2
    host.reset()
    if evaluates and group:
        host.log_probabilities()
    loss = 0.0
    if number and (iteration + seed) % 2:
        loss = host.passes(number)
    else:
        for left in reversed(range(number)):
            with host.model.no_sync() if left else nullcontext():
                of_batch = host.forward()
                of_batch.backward()
            loss += float(of_batch)
        if not number and host.model.ddp_config.overlap_grad_reduce:
            host.model.start_grad_sync()
        host.finalize()
    host.step(loss)
    if evaluates and not group:
        host.log_probabilities()


def train_unevenly(rank, world_size, seed, strategies, options):
    loop = partial(iterate, seed=seed)
    return [trained(strategy, loop, ITERATIONS, **options) for strategy in (("none", {}), *strategies)]


def test_groups_with_other_numbers_of_micro_batches_train_as_stock_megatron(tmp_path):
    seed, recorded = 3, (MOVING[0], {**MOVING[1], "record_dir": str(tmp_path)})
    # With the distributed optimizer, a rank has complete gradients of a part of each Parameter only.
    groups = ((0, 1), (2, 3))
    ranks = compare(seed, [recorded, *STRATEGIES], groups, use_distributed_optimizer=False)
    assert all(any(run.moved) for _, run, *_ in ranks)
    numbers_ID = np.repeat(numbers_of(seed), 2, axis=1)
    counts_ILDE = read_loads(tmp_path).counts_ILDE
    assert (counts_ILDE.sum(axis=3) == 2 * BATCH * LENGTH * numbers_ID[:, None]).all()
    owned_ILED = read_placements(tmp_path).owned_ILED
    assert (owned_ILED.reshape(*owned_ILED.shape[:3], 2, 2).sum(axis=4) == 1).all()
    for metrics, numbers_D in list(zip(read_metrics(tmp_path), numbers_ID, strict=True))[(seed + 1) % 2 :: 2]:
        # Of the schedule, which says how many sequences there were.
        tokens = metrics.tokens_per_s * metrics.iteration_s
        assert tokens == pytest.approx(BATCH * LENGTH * numbers_D.sum())


@pytest.mark.parametrize("seed", slow(range(3)))
def test_all_strategies_serve_groups_with_other_numbers_of_micro_batches(seed):
    # With gathers of parameters beside forward passes, stock Megatron hangs: one group has no such pass.
    compare(seed, [MOVING, *STRATEGIES, *MORE], (), overlap_grad_reduce=True)


def compare(seed, strategies, groups, **options):
    assert any(0 in numbers for numbers in numbers_of(seed))
    ranks = run_megatron_ranks(train_unevenly, 4, seed, strategies, options, ep=2)
    assert_equal(ranks, [name for name, _ in strategies], groups)
    return ranks
