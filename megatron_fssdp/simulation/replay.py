"""Replays recorded loads through a strategy, with the same calls in the same order as the runtime.

Shape letters: I iterations, Z micro-batches, L MoE layers, D devices, E experts, P pairs of expert and
device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from megatron_fssdp.planning.arrays import frozen_array
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.auto.auto_strategy import selecting
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.layer_planning import (
    StageLoads,
    moved_before,
    plan_after_gate,
    plan_before_gate,
)
from megatron_fssdp.strategies.strategy import MovesOwners, ResidentReplicas, Strategy

OnPlan = Callable[[int, int, LayerPlan], None]


class LayerDecision(NamedTuple):
    """A layer's plan before the gate, the plan that is executed, and the counts, int64 ``[D, E]``.

    These are of one micro-batch, or of all micro-batches of an iteration together, if they are equal.
    """

    planned: LayerPlan
    plan: LayerPlan
    counts_DE: np.ndarray


class ReplayedIteration(NamedTuple):
    """What a strategy decides for one iteration, for the layers of its ``micro_batches``.

    A single entry is for all micro-batches. Experts move before the iteration from the devices ``source_P``
    to ``device_P``, int64 ``[P]``, to a new owner or for a new resident replica.
    """

    micro_batches: list[list[LayerDecision]]
    source_P: np.ndarray
    device_P: np.ndarray


def _by_micro_batch(counts_ILDE: np.ndarray, num_micro_batches: int) -> np.ndarray:
    """Counts ``[I, Z, L, D, E]`` from those with or without the second axis, of which Z is then 1.

    Raises:
        ValueError: There is such an axis, but it is not that of ``num_micro_batches``.
    """
    counts_IZLDE = counts_ILDE[:, None] if counts_ILDE.ndim == 4 else counts_ILDE
    if counts_IZLDE.ndim != 5 or counts_IZLDE.shape[1] not in (1, num_micro_batches):
        raise ValueError(
            f"counts have shape {counts_ILDE.shape}, wanted (iterations, layers, devices, experts), or "
            f"(iterations, micro-batches, layers, devices, experts) with {num_micro_batches} micro-batches"
        )
    return counts_IZLDE


def replay_strategy(
    strategy: Strategy,
    counts_ILDE: np.ndarray,
    topology: Topology,
    profile: LayerProfile | None,
    *,
    num_micro_batches: int = 1,
    past_ILDE: np.ndarray | None = None,
    on_plan: OnPlan | None = None,
) -> Iterator[ReplayedIteration]:
    """Let a new strategy decide for one iteration after another, starting with Megatron's even owners.

    The order is that of the runtime. A strategy that wants a profile gets ``profile``, as measuring would
    have found it, after its ``profile_iterations``. Owners are reconsidered before an iteration. The gate's
    counts, (token, k) pairs in integers, are known after the plan, and become history when the iteration
    ends. ``counts_ILDE`` may have an axis of micro-batches behind that of iterations, ``[I, Z, L, D, E]``.
    Otherwise, every micro-batch has an equal share of its iteration's counts.

    Iterations before the first one, ``past_ILDE``, only fill the history. ``on_plan`` is called with the
    iteration, the layer's index and each plan that is executed.

    Raises:
        ValueError: There are other micro-batches than ``num_micro_batches``.
    """
    counts_IZLDE = _by_micro_batch(counts_ILDE, num_micro_batches)
    _, num_counted, num_layers, num_devices, num_experts = counts_IZLDE.shape
    times = num_micro_batches // num_counted
    owners = OwnerMap.even(num_layers, num_experts, num_devices)
    numbers = range(1, num_layers + 1)
    contexts = [
        LayerContext(number, owner_E, topology)
        for number, owner_E in zip(numbers, owners.device_LE, strict=True)
    ]
    histories = [LoadHistory(strategy.window, num_devices, num_experts) for _ in contexts]
    if past_ILDE is not None:
        for past_ZLDE in _by_micro_batch(past_ILDE[-strategy.window :], num_micro_batches):
            for history, past_ZDE in zip(histories, past_ZLDE.swapaxes(0, 1), strict=True):
                _remember(history, past_ZDE.astype(np.int64))
    micro_batches: list[list[LayerDecision]] = []
    # If there are earlier iterations, they have already been measured.
    profiled_at = strategy.profile_iterations if past_ILDE is None else 0
    for iteration, counts_ZLDE in enumerate(counts_IZLDE):
        if strategy.profile_iterations and iteration == profiled_at:
            contexts = [replace(context, profile=profile) for context in contexts]
        if selecting(strategy):
            is_measured = contexts[0].profile is not None
            if strategy.selects_at(iteration, histories[0].num_seen if is_measured else 0):
                strategy.select(numbers, strategy.price(contexts, histories))
        before = [context.placement for context in contexts]
        moved = moved_before(strategy, iteration, partial(StageLoads.of, contexts, histories), owners)
        if isinstance(moved, OwnerMap):
            owners = moved
            after = zip(contexts, owners.device_LE, strict=True)
            contexts = [replace(context, owner_E=owner_E) for context, owner_E in after]
        elif moved is not None:
            after = zip(contexts, moved, strict=True)
            contexts = [replace(context, resident=placement) for context, placement in after]
        moves = [
            (placement.owner_E, *np.nonzero(context.placement.present_ED & ~placement.present_ED))
            for placement, context in zip(before, contexts, strict=True)
        ]
        source_P = np.concatenate([owner_E[expert_P] for owner_E, expert_P, _ in moves])
        device_P = np.concatenate([device_P for *_, device_P in moves])
        before_Z, micro_batches = micro_batches, [[] for _ in counts_ZLDE]
        is_same_ZL = _repeated_ZL(counts_IZLDE, iteration)
        for layer, (context, history) in enumerate(zip(contexts, histories, strict=True)):
            plan = planned = plan_before_gate(strategy, context, history)
            for number, layers in enumerate(micro_batches):
                # Equal counts stay one array, so that what follows from them is found again by it.
                known_DE = before_Z[number][layer].counts_DE if is_same_ZL[number, layer] else None
                new_DE = counts_ZLDE[number, layer]
                counts_DE = frozen_array(new_DE, np.int64) if known_DE is None else known_DE
                # The first micro-batch corrects a plan for the iteration.
                if planned.each_micro_batch or number == 0:
                    served = times if planned.each_micro_batch else num_micro_batches
                    batch_DE = counts_DE if times == 1 else counts_DE // times
                    plan = plan_after_gate(strategy, context, batch_DE, planned, served)
                    if on_plan is not None:
                        on_plan(iteration, layer, plan)
                layers.append(LayerDecision(planned, plan, counts_DE))
            _remember(history, [layers[-1].counts_DE for layers in micro_batches])
        yield ReplayedIteration(micro_batches, source_P, device_P)


def _repeated_ZL(counts_IZLDE: np.ndarray, iteration: int) -> np.ndarray:
    """Whether the counts of an iteration are those of the one before, bool ``[Z, L]``."""
    if not iteration:
        return np.zeros(counts_IZLDE.shape[1:3], np.bool_)
    same = counts_IZLDE[iteration] == counts_IZLDE[iteration - 1]
    return np.asarray(same.reshape(*same.shape[:2], -1).all(axis=2))


def _remember(history: LoadHistory, micro_batches: Sequence[np.ndarray] | np.ndarray) -> None:
    """Add an iteration of micro-batches with these counts, int64 ``[D, E]`` each, as the runtime does."""
    counts_DE = np.sum(micro_batches, axis=0) if len(micro_batches) > 1 else micro_batches[0]
    if counts_DE.any():
        history.append(counts_DE, [partial(np.asarray, batch_DE) for batch_DE in micro_batches])


def warm_up_iterations(strategy: Strategy, num_iterations: int) -> int:
    """Number of first iterations, of ``num_iterations``, in which a strategy cannot decide as it does later.

    It may wait for measured costs, for loads, or, if it acts only at an interval, for its first turn.
    """
    replicates = strategy.may_replicate(1)
    first = max(strategy.profile_iterations, int(replicates or strategy.moves_owners or strategy.selects))

    def is_turn(iteration: int) -> bool:
        if selecting(strategy):
            return strategy.selects_at(iteration, iteration)
        if isinstance(strategy, ResidentReplicas):
            return strategy.replicates_at(iteration)
        if isinstance(strategy, MovesOwners) and strategy.moves_owners and not replicates:
            return strategy.reshards_at(iteration)
        return True

    return next((i for i in range(first, num_iterations) if is_turn(i)), num_iterations)
