"""Asks a strategy what the runtime would ask it, in the same order, with recorded loads.

Shape letters: I iterations, L MoE layers, D devices, E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_traffic import (
    NO_TRANSFER,
    DispatchTraffic,
    pairs_traffic,
    transfer_traffic,
)
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import additional_transfer
from megatron_fssdp.simulation.layer_ledger import LayerLedger
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan, Strategy

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
    """Run a strategy's decisions over an iteration after the other, from Megatron's even owners on.

    As the runtime does: a strategy that wants a profile gets it after its ``profile_iterations``; owners
    are thought over before an iteration; the gate's counts come after the plan; they become history
    when the iteration ends. Every micro-batch is taken to have its part of an iteration's counts.

    Args:
        strategy: A fresh strategy.
        counts_ILDE: (token, k) pairs of an iteration by layer, source and expert.
        topology: Nodes of the devices.
        profile: What measuring would have found.
        num_micro_batches: Of an iteration.
        past_ILDE: Iterations before the first one, for the load history only.
        layer_numbers: Megatron's numbers of the layers; from 1 by default.
        on_plan: Called with iteration, layer index and the final plan.

    Returns:
        What every layer did.
    """
    num_iterations, num_layers, num_devices, num_experts = counts_ILDE.shape
    owners = OwnerMap.even(num_layers, num_experts, num_devices)
    numbers = range(1, num_layers + 1) if layer_numbers is None else layer_numbers
    contexts = [
        LayerContext(int(number), owners.device_LE[layer], topology) for layer, number in enumerate(numbers)
    ]
    histories = [LoadHistory(strategy.window, num_devices, num_experts) for _ in contexts]
    for past_LDE in () if past_ILDE is None else past_ILDE[-strategy.window :]:
        _remember(histories, past_LDE)
    ledger = LayerLedger(num_iterations, num_layers, topology)
    # Iterations before the first one count as measured.
    profiled_at = strategy.profile_iterations if past_ILDE is None else 0
    for iteration in range(num_iterations):
        if strategy.profile_iterations and iteration == profiled_at:
            contexts = [replace(context, profile=profile) for context in contexts]
        if strategy.selects:
            is_measured = contexts[0].profile is not None
            if strategy.selects_at(iteration, histories[0].num_seen if is_measured else 0):
                strategy.select(
                    [context.layer for context in contexts], strategy.price(contexts, histories), None
                )
        if strategy.moves_owners and strategy.reshards_at(iteration):
            owners = _reshard(strategy, contexts, histories, owners, ledger, iteration)
            contexts = [
                replace(context, owner_E=owners.device_LE[layer]) for layer, context in enumerate(contexts)
            ]
        if strategy.resident_slots and strategy.replicates_at(iteration):
            contexts = _replicate(strategy, contexts, histories, ledger, iteration)
        for layer, context in enumerate(contexts):
            counts_DE = counts_ILDE[iteration, layer].astype(np.int64)
            planned = strategy.check_plan(context, strategy.before_gate(context, histories[layer]))
            first_DE = counts_DE if num_micro_batches == 1 else counts_DE // num_micro_batches
            plan = strategy.after_gate(context, first_DE, planned, num_micro_batches)
            strategy.check_plan(context, plan)
            traffic = plan.traffic(counts_DE, topology, num_micro_batches)
            record_layer(ledger, iteration, layer, planned, plan, counts_DE, traffic)
            if on_plan is not None:
                on_plan(iteration, layer, plan)
        _remember(histories, counts_ILDE[iteration])
    return ledger


def _remember(histories: Sequence[LoadHistory], counts_LDE: np.ndarray) -> None:
    for history, counts_DE in zip(histories, counts_LDE, strict=True):
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
    strategy: Strategy,
    contexts: Sequence[LayerContext],
    histories: Sequence[LoadHistory],
    owners: OwnerMap,
    ledger: LayerLedger,
    iteration: int,
) -> OwnerMap:
    load_LE = np.stack([history.mean_E() for history in histories])
    new = strategy.reshard(contexts, load_LE, owners)
    moves = owners.device_LE != new.device_LE
    _move(ledger, iteration, owners.device_LE[moves], new.device_LE[moves])
    return new


def _replicate(
    strategy: Strategy,
    contexts: Sequence[LayerContext],
    histories: Sequence[LoadHistory],
    ledger: LayerLedger,
    iteration: int,
) -> list[LayerContext]:
    """The layers with the replicas that stay from now on."""
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
    """Parameters, masters and optimizer states go from device to device before an iteration."""
    if not len(source_P):
        return
    num_devices = ledger.topology.num_devices
    experts_DD = np.zeros((num_devices, num_devices), np.int64)
    np.add.at(experts_DD, (source_P, device_P), 1)
    ledger.reshard.put(iteration, 0, pairs_traffic(experts_DD, ledger.topology))
    ledger.reshard_experts_I[iteration] = len(source_P)
