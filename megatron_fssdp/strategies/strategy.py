"""What a strategy is: questions about a layer, answered with data.

Shape legend: D devices of the expert-parallel group, E experts of a layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from megatron_fssdp.planning.balanced.quota_planner import quota_dispatch, split_among_peers
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_traffic import DispatchTraffic, dispatch_traffic, quota_traffic
from megatron_fssdp.planning.cost.transfer_split import WHOLE, TransferSplit
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy, TokenDispatch, plan_dispatch
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan
from megatron_fssdp.strategies.auto.iteration_spread import IterationSpread
from megatron_fssdp.strategies.auto.selection_report import SelectionReport


@dataclass(frozen=True, eq=False)
class LayerContext:
    """What a strategy may know of one MoE layer.

    Attributes:
        layer: Megatron's layer number, counted from 1 over the whole model.
        owner_E: Device that keeps each expert's parameters and optimizer state.
        topology: Nodes of the layer's expert-parallel group.
        profile: Measured costs, once they are known.
        resident: Where experts have Parameters, if not with their owners only.
    """

    layer: int
    owner_E: np.ndarray
    topology: Topology
    profile: LayerProfile | None = None
    resident: ExpertPlacement | None = None

    @property
    def num_experts(self) -> int:
        """Routed experts of the layer."""
        return len(self.owner_E)

    @property
    def num_devices(self) -> int:
        """Ranks of the expert-parallel group."""
        return self.topology.num_devices

    @property
    def placement(self) -> ExpertPlacement:
        """Where experts have Parameters."""
        return self.resident or ExpertPlacement.owners_only(self.owner_E, self.num_devices)


@dataclass(frozen=True)
class LayerPlan:
    """One layer's decision for one iteration, executed by the runtime and by the simulator alike.

    Attributes:
        placement: Where each expert's parameters are present.
        transfer: How replicas get there, and their gradients home (the exact transpose).
        gather_ahead: Start to gather before the compute that precedes the layer, and not when
            the layer's tokens are ready to go.
        rematerialize: Release the replicas between the forward and the backward pass, and
            gather weights and reduce gradients with every micro-batch (Hecate §4.2). Without
            it both happen once an iteration.
        dispatch_policy: How each micro-batch's tokens are split among the holders of their experts.
        each_micro_batch: Ask :meth:`Strategy.after_gate` anew with every micro-batch's counts, and gather
            and reduce what it says for that micro-batch alone, beside the dispatch. The plan itself then
            has no replicas.
        split: Which part of the transfers runs beside the experts of the layer before, in place of the
            compute between the two; where weights stay for an iteration, and not under the pipelined
            schedule.
        tokens_ED: How many of this micro-batch's pairs of each expert each device computes, in place
            of the policy; int64 ``[E, D]``.
        resident: The replicas have Parameters of their own and stay. No weights travel; an iteration's
            gradients are summed at the owners and given back to the replicas.
    """

    placement: ExpertPlacement
    transfer: TransferPlan
    gather_ahead: bool = True
    rematerialize: bool = False
    dispatch_policy: DispatchPolicy = "even"
    each_micro_batch: bool = False
    split: TransferSplit = WHOLE
    tokens_ED: np.ndarray | None = None
    resident: bool = False

    def __post_init__(self) -> None:
        self.transfer.check_serves(self.placement)

    @property
    def life(self) -> ReplicaLife:
        """For how long the plan's replicas are on their devices."""
        if self.resident:
            return ReplicaLife.LASTING
        if self.each_micro_batch:
            return ReplicaLife.MICRO_BATCH
        return ReplicaLife.LAYER_PASS if self.rematerialize else ReplicaLife.ITERATION

    @property
    def is_split(self) -> bool:
        """Whether a part of the transfers runs beside the experts of the layer before, if there is one."""
        return self.gather_ahead and self.life is ReplicaLife.ITERATION and self.split != WHOLE

    @classmethod
    def owners_only(cls, context: LayerContext, *, each_micro_batch: bool = False) -> "LayerPlan":
        """Every expert on its owner and nowhere else."""
        placement = ExpertPlacement.owners_only(context.owner_E, context.num_devices)
        transfer = TransferPlan(context.num_devices, ())
        return cls(placement, transfer, each_micro_batch=each_micro_batch)

    def dispatch(
        self, counts_XDE: Sequence[np.ndarray] | np.ndarray, topology: Topology
    ) -> list[TokenDispatch]:
        """Where one micro-batch's tokens go.

        Args:
            counts_XDE: (token, k) pairs by expert-tensor-parallel peer, source and expert, int64.
            topology: Nodes of the devices.

        Returns:
            One dispatch a peer.
        """
        if self.tokens_ED is None:
            return [
                plan_dispatch(self.dispatch_policy, counts_DE, self.placement, topology)
                for counts_DE in counts_XDE
            ]
        load_XE = np.stack([counts_DE.sum(axis=0) for counts_DE in counts_XDE])
        quotas_XED = split_among_peers(self.tokens_ED, load_XE)
        return [
            quota_dispatch(tokens_ED, counts_DE, topology)
            for tokens_ED, counts_DE in zip(quotas_XED, counts_XDE, strict=True)
        ]

    def traffic(
        self, counts_DE: np.ndarray, topology: Topology, num_micro_batches: int = 1
    ) -> DispatchTraffic:
        """What an iteration's dispatches put on devices and links.

        Args:
            counts_DE: int64 (token, k) pairs of the iteration by source and expert, ``[D, E]``. Every
                micro-batch is taken to have its part of them.
            topology: Nodes of the devices.
            num_micro_batches: Of the iteration.
        """
        if self.tokens_ED is None:
            return dispatch_traffic(self.dispatch_policy, counts_DE, self.placement, topology)
        # Quotas are those of one micro-batch, and the others are like it.
        one = quota_dispatch(self.tokens_ED, counts_DE // num_micro_batches, topology)
        return quota_traffic(one).times(num_micro_batches)


class Strategy(Protocol):
    """Decides for one layer; pure given its arguments, so that all ranks decide alike."""

    @property
    def window(self) -> int:
        """Iterations of load history that the strategy looks at; at least 1."""
        ...

    @property
    def profile_iterations(self) -> int:
        """Iterations to measure before contexts get a profile; 0 if none is needed."""
        ...

    @property
    def replica_life(self) -> ReplicaLife:
        """Of all replicas in the strategy's plans, known before there is any: memory is accounted by it."""
        ...

    def check(self, context: LayerContext) -> None:
        """Refuse a layer that the strategy cannot serve.

        Raises:
            ValueError: With what does not fit and the next step.
        """
        ...

    def limits(self, context: LayerContext) -> str:
        """What follows from a layer's profile, for the log."""
        ...

    def slots(self, context: LayerContext) -> int:
        """Most replicas that a device may hold of a layer."""
        ...

    def reshards_at(self, iteration: int) -> bool:
        """Whether owners are thought over before the iteration after ``iteration`` of them."""
        ...

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """New owners for all layers of a pipeline stage, or the same.

        Args:
            contexts: The layers, in the order of the map.
            load_LE: Mean load of every expert in an iteration of the history, over all ranks that keep
                copies of the same owners.
            owners: The present ones.
        """
        ...

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Plan a layer's iteration from the loads of the iterations before it."""
        ...

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """Correct the plan by the exact counts of an iteration's first micro-batch, or of each one.

        Args:
            context: The layer.
            counts_DE: int64 ``[D, E]`` (token, k) pairs by source device and expert.
            plan: What :meth:`before_gate` said.
            num_micro_batches: How many micro-batches the answer is used for.

        Returns:
            ``plan`` itself, or one whose placement has more replicas.
        """
        ...


@runtime_checkable
class ChoosingStrategy(Strategy, Protocol):
    """A strategy that gives each layer one of several others, and thinks them over now and then."""

    def chosen(self, layer: int) -> str:
        """The strategy that a layer has, by the layer's number."""
        ...

    def resume(self, chosen: Mapping[int, str]) -> None:
        """Start with choices by layer number; unknown ones are left out."""
        ...

    def chooses_at(self, iteration: int, num_known: int) -> bool:
        """Whether strategies are thought over before the iteration after ``iteration`` of them.

        Args:
            iteration: Iterations that the model has been trained for.
            num_known: Iterations that this process has seen, once costs are measured; else 0.
        """
        ...

    def price(self, contexts: Sequence[LayerContext], histories: Sequence[LoadHistory]) -> np.ndarray:
        """Modelled seconds of an iteration of each layer under every candidate, [L, C]."""
        ...

    def choose(
        self, layers: Sequence[int], seconds_LC: np.ndarray, since_change: IterationSpread | None
    ) -> SelectionReport:
        """Choose anew for the layers of these numbers.

        Args:
            layers: Of a pipeline stage.
            seconds_LC: What :meth:`price` said, agreed on by all ranks that share owners.
            since_change: Seconds of the iterations since the last change, or since the start.
        """
        ...


@runtime_checkable
class ResidentStrategy(Strategy, Protocol):
    """A strategy whose replicas have Parameters and optimizer states of their own."""

    @property
    def spares(self) -> int:
        """Replicas of a layer that a device has room for."""
        ...

    def replicates_at(self, iteration: int) -> bool:
        """Whether replicas are thought over before the iteration after ``iteration`` of them."""
        ...

    def replicate(self, context: LayerContext, load_DE: np.ndarray) -> ExpertPlacement:
        """A layer's next placement, with the same owners; ``context.placement`` itself for no change.

        Args:
            context: The layer, with the present placement.
            load_DE: Mean loads of an iteration of the history by source and expert, ``[D, E]``, over all
                ranks that keep copies of the same experts.
        """
        ...
