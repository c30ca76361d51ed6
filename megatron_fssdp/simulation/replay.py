"""Replays recorded loads through a strategy, with the same calls in the same order as the runtime.

Shape letters: I iterations, L MoE layers, D devices, E experts, P pairs of expert and device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_fssdp.planning.arrays import frozen_array
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.auto import AutoStrategy
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.layer_planning import plan_after_gate, plan_before_gate
from megatron_fssdp.strategies.strategy import MovesOwners, ResidentReplicas, Strategy

OnPlan = Callable[[int, int, LayerPlan], None]


class LayerDecision(NamedTuple):
    """A layer's plan before the gate, the plan that is executed, and the counts, int64 ``[D, E]``."""

    planned: LayerPlan
    plan: LayerPlan
    counts_DE: np.ndarray


class ReplayedIteration(NamedTuple):
    """What a strategy decides for one iteration.

    Experts move before it from the devices ``source_P`` to ``device_P``, int64 ``[P]``, to a new owner or for
    a new resident replica.
    """

    layers: list[LayerDecision]
    source_P: np.ndarray
    device_P: np.ndarray


def replay_strategy(
    strategy: Strategy,
    counts_ILDE: np.ndarray,
    topology: Topology,
    profile: LayerProfile | None,
    *,
    num_micro_batches: int = 1,
    past_ILDE: np.ndarray | None = None,
    layer_numbers: Sequence[int] | None = None,
    on_plan: OnPlan | None = None,
) -> Iterator[ReplayedIteration]:
    """Let a new strategy decide for one iteration after another, starting with Megatron's even owners.

    The order is that of the runtime. A strategy that wants a profile gets ``profile``, as measuring would
    have found it, after its ``profile_iterations``. Owners are reconsidered before an iteration. The gate's
    counts, (token, k) pairs in integers, are known after the plan, and become history when the iteration
    ends. Every micro-batch has an equal share of an iteration's counts.

    Iterations before the first one, ``past_ILDE``, only fill the history. ``layer_numbers`` are Megatron's,
    by default 1 to L. ``on_plan`` is called with the iteration, the layer's index and the plan that is
    executed.
    """
    _, num_layers, num_devices, num_experts = counts_ILDE.shape
    owners = OwnerMap.even(num_layers, num_experts, num_devices)
    numbers = layer_numbers or range(1, num_layers + 1)
    contexts = [
        LayerContext(number, owner_E, topology)
        for number, owner_E in zip(numbers, owners.device_LE, strict=True)
    ]
    histories = [LoadHistory(strategy.window, num_devices, num_experts) for _ in contexts]
    for past_LDE in () if past_ILDE is None else past_ILDE[-strategy.window :]:
        for history, counts_DE in zip(histories, past_LDE, strict=True):
            if counts_DE.any():
                history.append(counts_DE)
    # If there are earlier iterations, they have already been measured.
    profiled_at = strategy.profile_iterations if past_ILDE is None else 0
    for iteration, counts_LDE in enumerate(counts_ILDE):
        if strategy.profile_iterations and iteration == profiled_at:
            contexts = [replace(context, profile=profile) for context in contexts]
        if isinstance(strategy, AutoStrategy):
            is_measured = contexts[0].profile is not None
            if strategy.selects_at(iteration, histories[0].num_seen if is_measured else 0):
                strategy.select(numbers, strategy.price(contexts, histories), None)
        before = [context.placement for context in contexts]
        if isinstance(strategy, MovesOwners) and strategy.moves_owners and strategy.reshards_at(iteration):
            since_jump = [
                replace(context, num_since_jump=history.num_since_jump)
                for context, history in zip(contexts, histories, strict=True)
            ]
            load_LE = np.stack([history.mean_E() for history in histories])
            owners = strategy.reshard(since_jump, load_LE, owners)
            contexts = [
                replace(context, owner_E=owner_E)
                for context, owner_E in zip(contexts, owners.device_LE, strict=True)
            ]
        if isinstance(strategy, ResidentReplicas) and strategy.replicates_at(iteration):
            contexts = [
                replace(context, resident=strategy.replicate(context, history.mean_DE()))
                for context, history in zip(contexts, histories, strict=True)
            ]
        moves = [
            (placement.owner_E, *np.nonzero(context.placement.present_ED & ~placement.present_ED))
            for placement, context in zip(before, contexts, strict=True)
        ]
        source_P = np.concatenate([owner_E[expert_P] for owner_E, expert_P, _ in moves])
        device_P = np.concatenate([device_P for *_, device_P in moves])
        layers = []
        for layer, (context, history) in enumerate(zip(contexts, histories, strict=True)):
            counts_DE = frozen_array(counts_LDE[layer], np.int64)
            planned = plan_before_gate(strategy, context, history)
            first_DE = counts_DE // num_micro_batches
            plan = plan_after_gate(strategy, context, first_DE, planned, num_micro_batches)
            if on_plan is not None:
                on_plan(iteration, layer, plan)
            layers.append(LayerDecision(planned, plan, counts_DE))
            if counts_DE.any():
                history.append(counts_DE)
        yield ReplayedIteration(layers, source_P, device_P)


def warm_up_iterations(strategy: Strategy, num_iterations: int) -> int:
    """Number of first iterations, of ``num_iterations``, in which a strategy cannot decide as it does later.

    It may wait for measured costs, for loads, or, if it acts only at an interval, for its first turn.
    """
    replicates = strategy.may_replicate(1)
    first = max(strategy.profile_iterations, int(replicates or strategy.moves_owners or strategy.selects))

    def is_turn(iteration: int) -> bool:
        if isinstance(strategy, AutoStrategy):
            return strategy.selects_at(iteration, iteration)
        if isinstance(strategy, ResidentReplicas):
            return strategy.replicates_at(iteration)
        if isinstance(strategy, MovesOwners) and strategy.moves_owners and not replicates:
            return strategy.reshards_at(iteration)
        return True

    return next((i for i in range(first, num_iterations) if is_turn(i)), num_iterations)
