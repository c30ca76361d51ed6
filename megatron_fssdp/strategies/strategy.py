"""The base class of strategies: abilities that a strategy declares, and questions that it answers with plans.

Shape letters: D devices, E experts, L MoE layers, C candidate strategies.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron_fssdp.config.strategy.strategy_settings import (
    CollectiveSchedule,
    ExchangeUse,
    PlacementSettings,
    SmartScheduleUse,
    SteppedSettings,
)
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import GroupRing, Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.strategies.iteration_spread import IterationSpread
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.selection_report import SelectionReport


class Strategy[Settings: PlacementSettings](ABC):
    """The base class of every strategy, which plans one layer at a time.

    A strategy must implement only :meth:`before_gate`. The defaults of the other members fit a strategy
    whose replicas live for one iteration and whose experts keep their owners.

    All answers are pure functions of the arguments, so that all ranks make the same plans. The runtime and
    the simulator read the same abilities and ask the same questions in the same order. Both refuse a plan
    that needs an ability which the strategy does not declare (:meth:`check_plan`).

    Args:
        settings: The strategy's validated settings.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    # Data that the strategy needs.

    @property
    def window(self) -> int:
        """Number of iterations of load history that the strategy uses; at least 1."""
        return 1

    @property
    def profile_iterations(self) -> int:
        """Iterations to measure before layers get a profile; 0 if the strategy needs no measured costs."""
        return 0

    # Abilities of the strategy. They are read before the first layer is built and must not change.

    @property
    def replica_life(self) -> ReplicaLife:
        """How long the replicas of the strategy's plans live; estimates of memory use it."""
        return ReplicaLife.ITERATION

    @property
    def overlaps(self) -> bool:
        """Whether transfers may run beside the model's compute and the dispatch.

        If so, transfers get a separate process group. Plans with ``gather_ahead`` need this ability.
        """
        return True

    @property
    def splits(self) -> bool:
        """Whether plans may split transfers: a part then travels beside the experts of another layer."""
        return False

    @property
    def moves_owners(self) -> bool:
        """Whether experts may change owners. Default: whether the class overrides :meth:`reshards_at`."""
        return type(self).reshards_at is not Strategy.reshards_at

    @property
    def resident_slots(self) -> int:
        """Number of resident replicas of a layer for which a device has room; 0 if the strategy has none."""
        return 0

    @property
    def candidate_names(self) -> tuple[str, ...]:
        """Names of the strategies among which this one selects for each layer; empty if it selects none."""
        return ()

    @property
    def selects(self) -> bool:
        """Whether this strategy selects another strategy for each layer and reconsiders it at an interval."""
        return bool(self.candidate_names)

    def may_replicate(self, layer: int) -> bool:
        """Whether a layer can have replicas until the strategy changes its selection, for any loads.

        A layer without replicas can use more schedules.

        Args:
            layer: Megatron's layer number.
        """
        return True

    @property
    def collective_schedule(self) -> CollectiveSchedule:
        """Order of collectives if ranks share experts or tokens, from the settings."""
        return self.settings.collective_schedule

    @property
    def smart_schedule(self) -> SmartScheduleUse:
        """Whether layers run in the steps of FasterMoE's smart schedule, from the settings."""
        return self.settings.smart_schedule if isinstance(self.settings, SteppedSettings) else False

    @property
    def exchange(self) -> ExchangeUse:
        """How tokens travel, from the settings."""
        return self.settings.exchange if isinstance(self.settings, SteppedSettings) else "megatron"

    def ring(self, device: int, topology: Topology) -> GroupRing | None:
        """Groups of ranks with which a device exchanges tokens step by step (smart schedule).

        Args:
            device: Rank in the expert-parallel group.
            topology: Nodes of the devices.

        Returns:
            The ring of groups; ``None`` if the device always exchanges with all ranks at once.

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

    def check_sizes(self, num_experts: int, topology: Topology) -> None:
        """Refuse a model whose layers the strategy cannot serve when every device owns equally many experts.

        Args:
            num_experts: Number of routed experts of a layer, E.
            topology: Nodes of the devices.

        Raises:
            ValueError: The settings or the strategy do not fit the sizes; the message has the reason and the
                next step.
        """
        self.settings.check_num_experts(num_experts)
        self.ring(0, topology)
        # Megatron refuses other numbers of experts itself. The simulator takes them, as experiments.
        if num_experts % topology.num_devices == 0:
            self.check(LayerContext(1, even_owners(num_experts, topology.num_devices), topology))

    def check(self, context: LayerContext) -> None:  # noqa: B027
        """Refuse a layer that the strategy cannot serve.

        Raises:
            ValueError: The strategy cannot serve the layer; the message has the reason and the next step.
        """

    def limits(self, context: LayerContext) -> str:
        """The limits that follow from a layer's profile, as a text for the log."""
        return f"at most {self.slots(context)} replicas of a layer on a device"

    def slots(self, context: LayerContext) -> int:
        """Largest number of replicas of a layer on a device; estimates of memory use it."""
        return context.num_experts

    @abstractmethod
    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Plan a layer's iteration from the loads of the iterations before it.

        Args:
            context: Data of the layer.
            history: Loads of the last iterations; it is empty in the first iteration.
        """

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """Correct the plan with the exact counts of an iteration's first micro-batch, or of each micro-batch.

        Args:
            context: Data of the layer.
            counts_DE: (token, k) pairs of the micro-batch by source device and expert, int64 ``[D, E]``.
            plan: Plan that :meth:`before_gate` returned.
            num_micro_batches: Number of micro-batches for which the answer is used.

        Returns:
            ``plan`` itself, or a plan with other replicas and the same life. Replicas that it lacks are freed
            once they have arrived; those that it adds are gathered while the layer waits.
        """
        return plan

    def asks_after_gate(self, layer: int) -> bool:
        """Whether :meth:`after_gate` may change a plan, so that the host has to wait for the exact counts.

        The default is True for strategies that override :meth:`after_gate`. Plans with ``each_micro_batch``
        ask in any case.

        Args:
            layer: Megatron's layer number.
        """
        return type(self).after_gate is not Strategy.after_gate

    # Owners: asked of strategies that move owners.

    def reshards_at(self, iteration: int) -> bool:
        """Whether to reconsider owners once ``iteration`` iterations are complete."""
        return False

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """New owners for all layers of a pipeline stage, or the present ones.

        The default calls :meth:`reshard_layer` for each layer. Ranks with copies of the same experts must
        decide alike, but their histories differ. The answer can therefore depend on the arguments and on
        earlier answers, and not on what :meth:`before_gate` got.

        Args:
            contexts: Data of the layers, in the order of the map.
            load_LE: Mean load of every expert in an iteration of the history, float ``[L, E]``. The mean is
                over all ranks that have copies of the same experts.
            owners: The present owners.
        """
        device_LE = owners.device_LE.copy()
        for index, context in enumerate(contexts):
            context = replace(context, owner_E=owners.device_LE[index])
            device_LE[index] = self.reshard_layer(context, load_LE[index])
        return owners.with_owners(device_LE)

    def reshard_layer(self, context: LayerContext, load_E: np.ndarray) -> np.ndarray:
        """New owners of one layer, or the present ones; every device keeps its number of experts.

        ``auto`` asks this method and never :meth:`reshard`, because its layers differ in their strategies.

        Args:
            context: Data of the layer, with the present owners.
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
            context: Data of the layer, with the present placement.
            load_DE: Mean loads of an iteration of the history by source and expert, float ``[D, E]``. The
                mean is over all ranks that have copies of the same experts.
        """
        return context.placement

    # Selection: asked of a strategy that selects other strategies for its layers.

    def selected(self, layer: int) -> str | None:
        """Name of the selected strategy of the layer with this number; ``None`` for this strategy."""
        return None

    def resume(self, selected: Mapping[int, str]) -> None:  # noqa: B027
        """Start with the selection of another run.

        Args:
            selected: Strategy names by layer number; unknown names are ignored.
        """

    def selects_at(self, iteration: int, num_known: int) -> bool:
        """Whether to reconsider the selection once ``iteration`` iterations are complete.

        Args:
            iteration: Number of iterations for which the model has been trained.
            num_known: Number of iterations that this process has run, if costs are measured; otherwise 0.
        """
        return False

    def price(self, contexts: Sequence[LayerContext], histories: Sequence[LoadHistory]) -> np.ndarray:
        """Modelled seconds of an iteration of each layer under every candidate, float ``[L, C]``.

        Args:
            contexts: Data of the layers, with profiles.
            histories: Loads of each layer.
        """
        return np.zeros((len(contexts), 0))

    def select(
        self, layers: Sequence[int], seconds_LC: np.ndarray, since_change: IterationSpread | None
    ) -> SelectionReport:
        """Reconsider the strategies of the given layers.

        Args:
            layers: Numbers of a pipeline stage's layers.
            seconds_LC: Results of :meth:`price`, equal on all ranks that share owners, float ``[L, C]``.
            since_change: Times of the iterations since the last change or since the start.
        """
        return SelectionReport((), since_change, None)

    def check_plan(self, context: LayerContext, plan: LayerPlan) -> LayerPlan:
        """Refuse a plan that the strategy's declared abilities do not cover; subclasses must not override it.

        Args:
            context: Data of the layer.
            plan: Plan that the strategy returned.

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
            self.replica_life is not ReplicaLife.SELECTED or plan.life is ReplicaLife.RESIDENT
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
