"""Replays recorded loads through a strategy, with the same calls in the same order as the runtime.

Shape letters: I iterations, L MoE layers, D devices, E experts, P pairs of expert and device.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_traffic import (
    NO_TRANSFER,
    DispatchTraffic,
    moves_traffic,
    transfer_traffic,
)
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.placement.array_freezing import frozen_array
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import additional_transfer
from megatron_fssdp.simulation.layer_ledger import LayerLedger
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.layer_planning import plan_after_gate, plan_before_gate
from megatron_fssdp.strategies.strategy import MovesOwners, ResidentReplicas, SelectsStrategies, Strategy

OnPlan = Callable[[int, int, LayerPlan], None]


def replay_strategy(
    strategy: Strategy,
    counts_ILDE: np.ndarray,
    topology: Topology,
    profile: LayerProfile,
    *,
    num_micro_batches: int = 1,
    past_ILDE: np.ndarray | None = None,
    layer_numbers: Sequence[int] | None = None,
    on_plan: OnPlan | None = None,
) -> LayerLedger:
    """Let a strategy decide for one iteration after another, starting with Megatron's even owners.

    The order is that of the runtime. A strategy that wants a profile gets it after its
    ``profile_iterations``. Owners are reconsidered before an iteration. The gate's counts are known after the
    plan, and become history when the iteration ends. Every micro-batch has an equal share of an iteration's
    counts.

    Args:
        strategy: A new strategy object without history.
        counts_ILDE: Integers ``[I, L, D, E]``. (token, k) pairs that each source device sends to each expert.
        topology: Node of each device.
        profile: Profile that measuring would have found.
        num_micro_batches: Number of micro-batches of an iteration.
        past_ILDE: Pairs of the iterations before the first one, as ``counts_ILDE``. They only fill the load
            history.
        layer_numbers: Megatron's number of each layer, or None for 1 to L.
        on_plan: Function that is called with the iteration, the layer's index and the final plan.

    Returns:
        Decisions and traffic of every layer in every iteration.
    """
    num_iterations, num_layers, num_devices, num_experts = counts_ILDE.shape
    owners = OwnerMap.even(num_layers, num_experts, num_devices)
    numbers = range(1, num_layers + 1) if layer_numbers is None else layer_numbers
    contexts = [
        LayerContext(int(number), owners.device_LE[layer], topology) for layer, number in enumerate(numbers)
    ]
    histories = [LoadHistory(strategy.window, num_devices, num_experts) for _ in contexts]
    for past_LDE in () if past_ILDE is None else past_ILDE[-strategy.window :]:
        for history, counts_DE in zip(histories, past_LDE, strict=True):
            _remember(history, counts_DE)
    ledger = LayerLedger(num_iterations, num_layers, topology)
    # If there are earlier iterations, they have already been measured.
    profiled_at = strategy.profile_iterations if past_ILDE is None else 0
    for iteration in range(num_iterations):
        if strategy.profile_iterations and iteration == profiled_at:
            contexts = [replace(context, profile=profile) for context in contexts]
        if isinstance(strategy, SelectsStrategies):
            is_measured = contexts[0].profile is not None
            if strategy.selects_at(iteration, histories[0].num_seen if is_measured else 0):
                strategy.select(
                    [context.layer for context in contexts], strategy.price(contexts, histories), None
                )
        if isinstance(strategy, MovesOwners) and strategy.moves_owners and strategy.reshards_at(iteration):
            owners = _reshard(strategy, contexts, histories, owners, ledger, iteration)
            contexts = [
                replace(context, owner_E=owners.device_LE[layer]) for layer, context in enumerate(contexts)
            ]
        if isinstance(strategy, ResidentReplicas) and strategy.replicates_at(iteration):
            contexts = _replicate(strategy, contexts, histories, ledger, iteration)
        for layer, context in enumerate(contexts):
            counts_DE = frozen_array(counts_ILDE[iteration, layer], np.int64)
            planned = plan_before_gate(strategy, context, histories[layer])
            first_DE = counts_DE if num_micro_batches == 1 else counts_DE // num_micro_batches
            plan = plan_after_gate(strategy, context, first_DE, planned, num_micro_batches)
            choices = profile.choices if plan.deduplicated else None
            traffic = plan.traffic(counts_DE, topology, num_micro_batches, choices)
            record_layer(ledger, iteration, layer, planned, plan, counts_DE, traffic)
            if on_plan is not None:
                on_plan(iteration, layer, plan)
            _remember(histories[layer], counts_DE)
    return ledger


def _remember(history: LoadHistory, counts_DE: np.ndarray) -> None:
    if counts_DE.any():
        history.append(counts_DE)


def record_layer(
    ledger: LayerLedger,
    iteration: int,
    layer: int,
    planned: LayerPlan,
    plan: LayerPlan,
    counts_DE: np.ndarray,
    dispatch: DispatchTraffic,
) -> None:
    """Write what one layer does in one iteration.

    Args:
        ledger: Where to write.
        iteration: Number of the iteration, from 0.
        layer: Index of the layer.
        planned: What was planned before the gate.
        plan: What is executed.
        counts_DE: (token, k) pairs of the iteration by source and expert, int64 ``[D, E]``.
        dispatch: All dispatches of the iteration.
    """
    topology = ledger.topology
    gather = reduce = transfer_traffic(planned.transfer, topology)
    if plan.resident:
        gather = NO_TRANSFER
    addition = NO_TRANSFER
    if plan is not planned:
        reduce = transfer_traffic(plan.transfer, topology)
        added = (
            plan.transfer
            if plan.each_micro_batch
            else additional_transfer(planned.placement, plan.placement, topology)
        )
        addition = transfer_traffic(added, topology)
    ledger.put(iteration, layer, plan, counts_DE, dispatch, gather, reduce, addition)


def _reshard(
    strategy: MovesOwners,
    contexts: Sequence[LayerContext],
    histories: Sequence[LoadHistory],
    owners: OwnerMap,
    ledger: LayerLedger,
    iteration: int,
) -> OwnerMap:
    load_LE = np.stack([history.mean_E() for history in histories])
    contexts = [
        replace(context, num_since_jump=history.num_since_jump)
        for context, history in zip(contexts, histories, strict=True)
    ]
    new = strategy.reshard(contexts, load_LE, owners)
    moves = owners.device_LE != new.device_LE
    _move(ledger, iteration, owners.device_LE[moves], new.device_LE[moves])
    return new


def _replicate(
    strategy: ResidentReplicas,
    contexts: Sequence[LayerContext],
    histories: Sequence[LoadHistory],
    ledger: LayerLedger,
    iteration: int,
) -> list[LayerContext]:
    """Return the contexts of the layers with their new resident replicas, and record the moved experts."""
    placements = [
        strategy.replicate(context, history.mean_DE())
        for context, history in zip(contexts, histories, strict=True)
    ]
    sources, destinations = [], []
    for context, placement in zip(contexts, placements, strict=True):
        expert_P, device_P = np.nonzero(placement.present_ED & ~context.placement.present_ED)
        sources.append(context.owner_E[expert_P])
        destinations.append(device_P)
    _move(ledger, iteration, np.concatenate(sources), np.concatenate(destinations))
    return [
        replace(context, resident=placement) for context, placement in zip(contexts, placements, strict=True)
    ]


def _move(ledger: LayerLedger, iteration: int, source_P: np.ndarray, device_P: np.ndarray) -> None:
    """Record moves of parameters, master weights and optimizer states before an iteration."""
    if not len(source_P):
        return
    ledger.reshard.put(iteration, 0, moves_traffic(source_P, device_P, ledger.topology))
    ledger.reshard_experts_I[iteration] = len(source_P)
