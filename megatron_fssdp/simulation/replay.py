"""Replays recorded loads through a strategy, with the same calls in the same order as the runtime.

Shape letters: I iterations, L MoE layers, D devices, E experts, P pairs of expert and device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_traffic import (
    NO_TRANSFER,
    BusiestLinks,
    DispatchTraffic,
    TransferTraffic,
    moves_traffic,
    transfer_traffic,
)
from megatron_fssdp.planning.cost.transfer_split import WHOLE, TransferSplit
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.placement.array_freezing import frozen_array
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import additional_transfer
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.stepped_plans import plan_after_gate, plan_before_gate
from megatron_fssdp.strategies.strategy import Strategy

OnPlan = Callable[[int, int, LayerPlan], None]

NO_MOVES = BusiestLinks()


@dataclass(frozen=True, eq=False, slots=True)
class LayerRecord:
    """What the plan of one layer does in one iteration.

    Attributes:
        tokens_D: (token, k) pairs that each device computes, int32 ``[D]``.
        most_routed: Pairs of the source device that routes the most.
        dispatch: Pairs on the busiest links in one direction of the dispatch.
        cross_node: Pairs that are sent to another node.
        gather: Experts that spAG materializes before the gate. Resident replicas have none.
        reduce: Experts whose gradients spRS reduces.
        addition: Experts that a plan after the gate adds.
        life: How long the replicas live.
        ahead: Whether spAG and spRS run beside the compute before the layer.
        split: Shares of spAG and spRS that run beside the experts of the layer before.
        in_steps: Whether the layer runs in the steps of the smart schedule.
        deduplicated: Whether tokens travel by the deduplicated exchange.
        exact: Whether the device shares tokens out by exact counts.
        replicas: Replicas on all devices together.
        most_replicas: Replicas on the device that has the most.
        most_owned: Experts of the layer on the device that owns the most.
    """

    tokens_D: np.ndarray
    most_routed: int
    dispatch: BusiestLinks
    cross_node: int
    gather: TransferTraffic
    reduce: TransferTraffic
    addition: TransferTraffic
    life: ReplicaLife
    ahead: bool
    split: TransferSplit
    in_steps: bool
    deduplicated: bool
    exact: bool
    replicas: int
    most_replicas: int
    most_owned: int

    @classmethod
    def of(
        cls,
        planned: LayerPlan,
        plan: LayerPlan,
        counts_DE: np.ndarray,
        dispatch: DispatchTraffic,
        topology: Topology,
        *,
        is_first: bool = False,
    ) -> "LayerRecord":
        """Return the record of one layer in one iteration.

        Args:
            planned: Plan before the gate.
            plan: Plan that is executed.
            counts_DE: (token, k) pairs of the iteration by source and expert, int64 ``[D, E]``.
            dispatch: Traffic of all dispatches of the iteration.
            topology: Nodes of the devices.
            is_first: Whether this is the first MoE layer. No experts before it could hide a split transfer.
        """
        gather = reduce = transfer_traffic(planned.transfer, topology)
        addition = NO_TRANSFER
        if plan is not planned:
            reduce = addition = transfer_traffic(plan.transfer, topology)
            if not plan.each_micro_batch:
                added = additional_transfer(planned.placement, plan.placement, topology)
                addition = transfer_traffic(added, topology)
        placement = plan.placement
        return cls(
            tokens_D=dispatch.tokens_D.astype(np.int32),
            most_routed=int(counts_DE.sum(axis=1).max()),
            dispatch=dispatch.busiest,
            cross_node=dispatch.cross_node,
            gather=NO_TRANSFER if plan.resident else gather,
            reduce=reduce,
            addition=addition,
            life=plan.life,
            ahead=plan.gather_ahead,
            split=plan.split if plan.is_split and not is_first else WHOLE,
            in_steps=plan.in_steps,
            deduplicated=plan.deduplicated,
            exact=plan.shares_exactly,
            replicas=placement.num_replicas,
            most_replicas=int(placement.replicas_per_device_D.max()) if placement.num_replicas else 0,
            most_owned=int(placement.owned_per_device_D.max()),
        )

    @property
    def gathered(self) -> int:
        """Number of experts whose weights travel to replicas."""
        return self.gather.num_experts + self.addition.num_experts

    @property
    def gathered_between_nodes(self) -> int:
        """Number of these experts that travel from one node to another."""
        return self.gather.num_between_nodes + self.addition.num_between_nodes


@dataclass(frozen=True, eq=False, slots=True)
class IterationRecord:
    """What a strategy does in one iteration.

    Attributes:
        layers: Record of each MoE layer.
        moved: Experts on the busiest links before the iteration, for new owners or new resident replicas.
        num_moved: Number of experts that get a new owner or a new resident replica.
    """

    layers: list[LayerRecord]
    moved: BusiestLinks = NO_MOVES
    num_moved: int = 0


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
) -> list[IterationRecord]:
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
        Decisions and traffic of every iteration.
    """
    _, num_layers, num_devices, num_experts = counts_ILDE.shape
    owners = OwnerMap.even(num_layers, num_experts, num_devices)
    numbers = range(1, num_layers + 1) if layer_numbers is None else layer_numbers
    contexts = [
        LayerContext(int(number), owners.device_LE[layer], topology) for layer, number in enumerate(numbers)
    ]
    histories = [LoadHistory(strategy.window, num_devices, num_experts) for _ in contexts]
    for past_LDE in () if past_ILDE is None else past_ILDE[-strategy.window :]:
        for history, counts_DE in zip(histories, past_LDE, strict=True):
            _remember(history, counts_DE)
    # If there are earlier iterations, they have already been measured.
    profiled_at = strategy.profile_iterations if past_ILDE is None else 0
    records = []
    for iteration, counts_LDE in enumerate(counts_ILDE):
        if strategy.profile_iterations and iteration == profiled_at:
            contexts = [replace(context, profile=profile) for context in contexts]
        if strategy.selects:
            is_measured = contexts[0].profile is not None
            if strategy.selects_at(iteration, histories[0].num_seen if is_measured else 0):
                layers = [context.layer for context in contexts]
                strategy.select(layers, strategy.price(contexts, histories), None)
        source_P: list[int] = []
        device_P: list[int] = []
        if strategy.moves_owners and strategy.reshards_at(iteration):
            before, owners = owners, _resharded(strategy, contexts, histories, owners)
            moves_LE = before.device_LE != owners.device_LE
            source_P += before.device_LE[moves_LE].tolist()
            device_P += owners.device_LE[moves_LE].tolist()
            contexts = [
                replace(context, owner_E=owners.device_LE[layer]) for layer, context in enumerate(contexts)
            ]
        if strategy.resident_slots and strategy.replicates_at(iteration):
            for layer, context in enumerate(contexts):
                placement = strategy.replicate(context, histories[layer].mean_DE())
                expert_P, new_P = np.nonzero(placement.present_ED & ~context.placement.present_ED)
                source_P += context.owner_E[expert_P].tolist()
                device_P += new_P.tolist()
                contexts[layer] = replace(context, resident=placement)
        layers_now: list[LayerRecord] = []
        for layer, (context, history) in enumerate(zip(contexts, histories, strict=True)):
            counts_DE = frozen_array(counts_LDE[layer], np.int64)
            planned = strategy.check_plan(context, plan_before_gate(strategy, context, history))
            first_DE = counts_DE if num_micro_batches == 1 else counts_DE // num_micro_batches
            plan = plan_after_gate(strategy, context, first_DE, planned, num_micro_batches)
            strategy.check_plan(context, plan)
            choices = profile.choices if plan.deduplicated else None
            traffic = plan.traffic(counts_DE, topology, num_micro_batches, choices)
            layers_now.append(
                LayerRecord.of(planned, plan, counts_DE, traffic, topology, is_first=layer == 0)
            )
            if on_plan is not None:
                on_plan(iteration, layer, plan)
            _remember(history, counts_DE)
        moved = NO_MOVES
        if source_P:
            moved = moves_traffic(np.array(source_P), np.array(device_P), topology)
        records.append(IterationRecord(layers_now, moved, len(source_P)))
    return records


def warm_up_iterations(strategy: Strategy, num_iterations: int) -> int:
    """Return the number of first iterations in which a strategy cannot decide as it does later.

    A strategy that needs measured costs waits for its profile. A strategy that plans from past loads has none
    in the first iteration. A strategy that acts only at an interval (resident replicas, owners without
    replicas, the selection of ``auto``) waits for its first turn. Plain expert parallelism has no warm-up.

    Args:
        strategy: A new strategy object, as :func:`replay_strategy` gets it.
        num_iterations: Number of iterations of the simulation.

    Returns:
        The number of warm-up iterations; ``num_iterations`` if the strategy never gets beyond them.
    """
    replicates = strategy.may_replicate(1)
    first = max(strategy.profile_iterations, int(replicates or strategy.moves_owners or strategy.selects))
    turns = range(first, num_iterations)
    if strategy.selects:
        return next((i for i in turns if strategy.selects_at(i, i)), num_iterations)
    if strategy.resident_slots:
        return next((i for i in turns if strategy.replicates_at(i)), num_iterations)
    if strategy.moves_owners and not replicates:
        return next((i for i in turns if strategy.reshards_at(i)), num_iterations)
    return min(first, num_iterations)


def _remember(history: LoadHistory, counts_DE: np.ndarray) -> None:
    if counts_DE.any():
        history.append(counts_DE)


def _resharded(
    strategy: Strategy, contexts: Sequence[LayerContext], histories: Sequence[LoadHistory], owners: OwnerMap
) -> OwnerMap:
    load_LE = np.stack([history.mean_E() for history in histories])
    contexts = [
        replace(context, num_since_jump=history.num_since_jump)
        for context, history in zip(contexts, histories, strict=True)
    ]
    return strategy.reshard(contexts, load_LE, owners)
