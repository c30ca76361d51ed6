"""Expert-parallel groups with copies of the same experts run other numbers of micro-batches, also none."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron_fssdp.testing.parallel_state import run_megatron_ranks

from ..training_run import slow
from .host_loops import Host, Trained
from .test_host_loops import MOVING, OVERLAPS, assert_equal_gradients

ITERATIONS = 10
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    MOVING,
    ("flexmoe", {"placement_interval": 1, "window": 1}),
    ("fssdp", {"reshard_interval": 2}),  # by measured costs
]
MORE: list[tuple[str, dict[str, Any]]] = [
    ("auto", {"reshard_interval": 2, "choice_interval": 2}),
    ("smartmoe", {"reshard_interval": 2}),
    ("quota", {"slots": 2}),
    *((name, {}) for name in ("ep", "prophet", "fastermoe")),
]


def numbers_of(seed: int) -> list[list[int]]:
    """Micro-batches of both groups in each iteration; at least one group has some."""
    drawn = np.random.default_rng(seed).integers(0, 4, (ITERATIONS, 2))
    drawn[drawn.sum(axis=1) == 0, seed % 2] = 1
    return [*drawn.tolist()]


def iterate(host: Host, iteration: int, seed: int) -> None:
    """One iteration: by a schedule or without, and now and then one group evaluates before, one after."""
    from megatron.core.distributed import finalize_model_grads

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
        finalize_model_grads([host.model])
    host.step(loss)
    if evaluates and not group:
        host.log_probabilities()


def train_unevenly(
    rank: int,
    world_size: int,
    seed: int,
    strategies: list[tuple[str, dict[str, Any]]],
    options: dict[str, Any],
) -> list[Trained]:
    import megatron_fssdp

    results = []
    for name, settings in [("none", {}), *strategies]:
        attachment = megatron_fssdp.attach(name, settings)
        host = Host(**options)
        host.model.train()
        for iteration in range(ITERATIONS):
            iterate(host, iteration, seed)
            if not iteration:
                host.overlaps_gather()
            for model in attachment.models if name != "none" else ():
                host.found.has_moved |= not model.session.slots.owners.is_even
        results.append(host.found)
    return results


@pytest.mark.parametrize("seed", [3, *slow(range(4, 7))])
def test_groups_with_other_numbers_of_micro_batches_train_as_stock_megatron(seed: int) -> None:
    compare(seed, STRATEGIES)


@pytest.mark.parametrize("seed", slow(range(2)))
def test_all_strategies_serve_groups_with_other_numbers_of_micro_batches(seed: int) -> None:
    compare(seed, [*STRATEGIES, *MORE], **OVERLAPS)


def compare(seed: int, strategies: list[tuple[str, dict[str, Any]]], **options: Any) -> None:
    assert any(0 in numbers for numbers in numbers_of(seed))
    ranks = run_megatron_ranks(train_unevenly, 4, seed, strategies, options, ep=2)
    for stock, *others in ranks:
        for (name, _), found in zip(strategies, others, strict=True):
            for what in ("losses", "norms", "forward_only"):
                wanted = pytest.approx(getattr(stock, what), rel=1e-5)
                assert getattr(found, what) == wanted, f"{name}: {what}"
    for number, strategy in enumerate(strategies, 1):
        for group in (ranks[:2], ranks[2:]):
            of_group = [[one[which] for one in group] for which in (number, 0)]
            assert_equal_gradients(*of_group, strategy[0])
            assert strategy != MOVING or all(one.has_moved for one in of_group[0])
