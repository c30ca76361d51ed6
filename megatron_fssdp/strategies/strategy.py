"""What a strategy is: abilities that it declares, and questions about a layer that it answers with data.

Shape letters: D devices, E experts, L MoE layers, C candidate strategies, X expert-tensor-parallel peers.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_fssdp.config.strategy_settings import CollectiveSchedule, PlacementSettings, SteppedSettings
from megatron_fssdp.planning.balanced.quota_planner import quota_dispatch, split_among_peers
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_traffic import DispatchTraffic, dispatch_traffic, quota_traffic
from megatron_fssdp.planning.cost.transfer_split import WHOLE, TransferSplit
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy, TokenDispatch, plan_dispatch
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.placement.group_ring import GroupRing
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan
from megatron_fssdp.strategies.iteration_spread import IterationSpread
from megatron_fssdp.strategies.selection_report import SelectionReport


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
        gather_ahead: Let transfers run beside compute: start to gather before the compute that precedes the
            layer, not when the layer's tokens are ready to go, and reduce beside its backward pass.
        rematerialize: Release the replicas between the forward and the backward pass, and
            gather weights and reduce gradients with every micro-batch (Hecate §4.2). Without
            it both happen once an iteration.
        dispatch_policy: How each micro-batch's tokens are split among the holders of their experts.
        each_micro_batch: Ask :meth:`Strategy.after_gate` anew with every micro-batch's counts, and gather
            and reduce what it says for that micro-batch alone, beside the dispatch. The plan itself then
            has no replicas.
        split: Which part of the transfers runs beside the experts of the layer before, in place of the
            compute between the two; where weights stay for an iteration, and not under the smart
            schedule.
        tokens_ED: How many of this micro-batch's pairs of each expert each device computes, in place
            of the policy; int64 ``[E, D]``.
        resident: Whether the replicas are resident. They have Parameters of their own, so no weights travel.
            An iteration's gradients are summed at the owners and given back to the replicas.
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
            return ReplicaLife.RESIDENT
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


class Strategy[Settings: PlacementSettings](ABC):
    """Decides for one layer at a time: the base class of every strategy.

    A strategy has to implement :meth:`before_gate` only. The defaults of the other members fit a strategy
    whose replicas live for one iteration and whose experts keep their owners.

    All answers are pure functions of the arguments, so that all ranks decide alike. The runtime and the
    simulator read the same abilities and ask the same questions in the same order. Both refuse a plan that
    needs an ability which the strategy does not declare (:meth:`check_plan`).

    Args:
        settings: The strategy's validated settings.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    # What the strategy has to know.

    @property
    def window(self) -> int:
        """Iterations of load history that the strategy looks at; at least 1."""
        return 1

    @property
    def profile_iterations(self) -> int:
        """Iterations to measure before contexts get a profile; 0 if the strategy needs no measured costs."""
        return 0

    # What the strategy can do. These abilities are read before the first layer is built, and do not change.

    @property
    def replica_life(self) -> ReplicaLife:
        """How long the replicas of the strategy's plans live; memory is accounted by it."""
        return ReplicaLife.ITERATION

    @property
    def overlaps(self) -> bool:
        """Whether transfers may run beside the model's compute and the dispatch.

        If so, they get a process group of their own. Plans with ``gather_ahead`` need this ability.
        """
        return True

    @property
    def moves_owners(self) -> bool:
        """Whether experts may change their owners; by default if the class overrides :meth:`reshards_at`."""
        return type(self).reshards_at is not Strategy.reshards_at

    @property
    def resident_slots(self) -> int:
        """Resident replicas of a layer for which a device has room; 0 if the strategy has none."""
        return 0

    @property
    def selects(self) -> bool:
        """Whether each layer runs under another strategy, which this one selects now and then."""
        return False

    def may_replicate(self, layer: int) -> bool:
        """Whether a layer may have replicas for now, whatever the loads.

        Layers without replicas may use more schedules.

        Args:
            layer: Megatron's layer number.
        """
        return True

    @property
    def collective_schedule(self) -> CollectiveSchedule:
        """In which order collectives carry rows where ranks share experts or tokens; from the settings."""
        return self.settings.collective_schedule

    def ring(self, device: int, topology: Topology) -> GroupRing | None:
        """The steps in which a device exchanges tokens; ``None`` if it exchanges all at once.

        Args:
            device: Rank in the expert-parallel group.
            topology: Nodes of the devices.

        Raises:
            ValueError: The settings' group size does not divide the devices.
        """
        settings = self.settings
        if (
            not isinstance(settings, SteppedSettings)
            or not settings.smart_schedule
            or topology.num_devices == 1
        ):
            return None
        return GroupRing.of(device, topology, settings.group_size)

    # Questions about one layer.

    def check(self, context: LayerContext) -> None:  # noqa: B027
        """Refuse a layer that the strategy cannot serve.

        Raises:
            ValueError: With what does not fit and the next step.
        """

    def limits(self, context: LayerContext) -> str:
        """What follows from a layer's profile, for the log."""
        return f"at most {self.slots(context)} replicas of a layer on a device"

    def slots(self, context: LayerContext) -> int:
        """Most replicas of a layer that a device may hold; memory is accounted by it."""
        return context.num_experts

    @abstractmethod
    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Plan a layer's iteration from the loads of the iterations before it."""

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
        return plan

    # Owners: asked of strategies that move owners.

    def reshards_at(self, iteration: int) -> bool:
        """Whether to reconsider owners once ``iteration`` iterations are complete."""
        return False

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """New owners for all layers of a pipeline stage, or the same; by default layer by layer.

        Args:
            contexts: The layers, in the order of the map.
            load_LE: Mean load of every expert in an iteration of the history, over all ranks that keep
                copies of the same owners, float ``[L, E]``.
            owners: The present owners.
        """
        device_LE = owners.device_LE.copy()
        for index, context in enumerate(contexts):
            context = replace(context, owner_E=owners.device_LE[index])
            device_LE[index] = self.reshard_layer(context, load_LE[index])
        return owners.with_owners(device_LE)

    def reshard_layer(self, context: LayerContext, load_E: np.ndarray) -> np.ndarray:
        """New owners of one layer, or the same; every device keeps its number of experts.

        ``auto`` asks this method and never :meth:`reshard`, because its layers differ in their strategies.

        Args:
            context: The layer, with the present owners.
            load_E: Mean load of every expert in an iteration of the history, float ``[E]``.

        Returns:
            Device of each expert, integers ``[E]``.
        """
        return context.owner_E

    # Resident replicas: asked of strategies with resident slots.

    def replicates_at(self, iteration: int) -> bool:
        """Whether to reconsider resident replicas once ``iteration`` iterations are complete."""
        return False

    def replicate(self, context: LayerContext, load_DE: np.ndarray) -> ExpertPlacement:
        """A layer's next placement, with the same owners; ``context.placement`` itself for no change.

        Args:
            context: The layer, with the present placement.
            load_DE: Mean loads of an iteration of the history by source and expert, float ``[D, E]``, over
                all ranks that keep copies of the same experts.
        """
        return context.placement

    # Selection: asked of a strategy that selects other strategies for its layers.

    def selected(self, layer: int) -> str | None:
        """Name of the strategy that a layer runs under, by the layer's number; ``None`` for this one."""
        return None

    def resume(self, selected: Mapping[int, str]) -> None:  # noqa: B027
        """Start with the selection of another run, names by layer number; unknown names are left out."""

    def selects_at(self, iteration: int, num_known: int) -> bool:
        """Whether to reconsider the selection once ``iteration`` iterations are complete.

        Args:
            iteration: Iterations that the model has been trained for.
            num_known: Iterations that this process has seen, once costs are measured; else 0.
        """
        return False

    def price(self, contexts: Sequence[LayerContext], histories: Sequence[LoadHistory]) -> np.ndarray:
        """Modelled seconds of an iteration of each layer under every candidate, float ``[L, C]``.

        Args:
            contexts: The layers, with profiles.
            histories: Their loads.
        """
        return np.zeros((len(contexts), 0))

    def select(
        self, layers: Sequence[int], seconds_LC: np.ndarray, since_change: IterationSpread | None
    ) -> SelectionReport:
        """Select anew for the layers of these numbers.

        Args:
            layers: Numbers of a pipeline stage's layers.
            seconds_LC: What :meth:`price` said, agreed on by all ranks that share owners, float ``[L, C]``.
            since_change: Seconds of the iterations since the last change, or since the start.
        """
        return SelectionReport((), since_change, None)

    def check_plan(self, context: LayerContext, plan: LayerPlan) -> LayerPlan:
        """Refuse a plan that the strategy's declared abilities do not cover; not to be overridden.

        Args:
            context: The layer.
            plan: What the strategy answered.

        Returns:
            The plan itself.

        Raises:
            ValueError: The plan needs an ability which the strategy does not declare.
        """
        if not plan.transfer.edges:
            return plan
        wanted = None
        if not self.may_replicate(context.layer):
            wanted = f"no replicas, because {type(self).__name__}.may_replicate says no"
        elif plan.life is not self.replica_life and (
            self.replica_life is not ReplicaLife.CHOSEN or plan.life is ReplicaLife.RESIDENT
        ):
            wanted = (
                f"replicas of {type(self).__name__}.replica_life, {self.replica_life.name}; the plan's is "
                f"{plan.life.name}"
            )
        elif plan.gather_ahead and not self.overlaps:
            wanted = f"gather_ahead=False, because {type(self).__name__}.overlaps says no"
        if wanted is not None:
            raise ValueError(
                f"layer {context.layer}: got a plan with {plan.placement.num_replicas} replicas, wanted "
                f"{wanted}: change the plan or declare the ability"
            )
        return plan
