"""The base class of strategies, which plans layers, and base classes for more jobs that some do.

The runtime and the simulator look at these classes and at the declared abilities, and ask the same questions
in the same order. All answers are pure functions of the arguments and of earlier ones, so that all ranks make
the same plans.

Shape letters: D devices, E experts, L MoE layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.strategy.strategy_registry import SHIPPED
from megatron_fssdp.config.strategy.strategy_settings import (
    PlacementSettings,
    SlotKeys,
    TokenTravel,
    profile_iterations,
)
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import GroupRing, Topology
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.layer_plan import LastResults, LayerContext, LayerPlan


class Strategy[Settings: PlacementSettings](ABC):
    """Plans one layer at a time.

    Only :meth:`before_gate` must be implemented. The other defaults fit a strategy whose replicas live for
    one iteration. A plan that needs an undeclared ability is refused (``layer_planning.py``). Attributes are
    set by the class or in ``__init__``, and do not change.

    Attributes:
        window: Number of iterations of load history that the strategy uses; at least 1.
        profile_iterations: Iterations to measure before layers get a profile; 0 if no costs are needed.
        replica_life: Ability: how long the replicas of plans live; estimates of memory use it. Where they
            may live for an iteration, they may live for a micro-batch or for a layer's pass.
        overlaps: Ability: transfers may run beside compute and the dispatch, as ``gather_ahead`` asks for.
        splits: Ability: a part of the weights may travel beside the experts of another layer (``early``).
        moves_owners: Ability: experts may change owners; see :class:`MovesOwners`.
        resident_slots: Ability: resident replicas of a layer on a device; see :class:`ResidentReplicas`.
        shares_plans: Ability: one rank, always the same, may ask :meth:`before_gate` for a layer and send the
            plan to the others. What the method remembers belongs to one layer, and :meth:`after_gate` does
            not need it.
        selects: Whether layers have other strategies, which the methods of ``auto`` select.
        package: Package that registered the strategy, for messages.
    """

    window: int = 1
    profile_iterations: int = 0
    replica_life: ReplicaLife = ReplicaLife.ITERATION
    overlaps: bool = True
    splits: bool = False
    moves_owners: bool = False
    resident_slots: int = 0
    shares_plans: bool = False
    selects: bool = False
    package: str = SHIPPED

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @cached_property
    def travel(self) -> TokenTravel:
        """How tokens travel, from the settings."""
        return self.settings.travel

    def ring(self, device: int, topology: Topology) -> GroupRing | None:
        """Groups of ranks with which a device exchanges tokens step by step (smart schedule), or ``None``."""
        is_stepped = self.travel.smart_schedule and topology.num_devices > 1
        return GroupRing.of(device, topology, self.travel.group_size) if is_stepped else None

    def check_sizes(self, num_experts: int, topology: Topology) -> None:
        """Refuse, by a ValueError, a model whose layers the strategy cannot serve with even owners."""
        self.settings.check_num_experts(num_experts)
        self.ring(0, topology)
        # Megatron refuses other numbers of experts itself. The simulator takes them, as experiments.
        if num_experts % topology.num_devices == 0:
            self.check(LayerContext(1, even_owners(num_experts, topology.num_devices), topology))

    def check(self, context: LayerContext) -> None:  # noqa: B027
        """Refuse a layer that the strategy cannot serve, by a ValueError with reason and next step."""

    def may_replicate(self, layer: int) -> bool:
        """Whether the layer can have replicas, for any loads, until a selection changes.

        A layer without replicas can use more schedules.
        """
        return True

    def selected(self, layer: int) -> str | None:
        """Name of the strategy that is selected for the layer; ``None`` if layers have no others."""
        return None

    def slots(self, context: LayerContext) -> int:
        """Largest number of replicas of a layer on a device."""
        return context.num_experts

    def slots_by_life(self, context: LayerContext) -> dict[ReplicaLife, int]:
        """Largest number of replicas of a layer on a device, for each of their lives; for estimates."""
        return {self.replica_life: self.slots(context)}

    def limits(self, context: LayerContext) -> str:
        """The limits that follow from a layer's profile, for the log."""
        return f"at most {self.slots(context)} replicas of a layer on a device"

    def plan_of(self, placement: ExpertPlacement, context: LayerContext, **more: Any) -> LayerPlan:
        """The plan with this placement, a two-level transfer, and more fields of :class:`LayerPlan`."""
        transfer = two_level_transfer(placement, context.topology)
        return LayerPlan(placement, transfer, gather_ahead=self.overlaps, **more)

    @abstractmethod
    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Plan a layer's iteration from the loads of the iterations before it; the first one has none."""

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """Correct the plan with the counts of a micro-batch, int64 ``[D, E]``.

        Plans that correct, or with ``each_micro_batch``, are asked. The answer serves ``num_micro_batches``.
        It is ``plan`` itself, or a plan with other replicas and the same life. Replicas that it lacks are
        freed once they have arrived; those that it adds are gathered beside the dispatch.
        """
        return plan

    def asks_after_gate(self, layer: int) -> bool:
        """Whether all plans of the layer correct, so that the host waits for counts in each iteration."""
        return type(self).after_gate is not Strategy.after_gate


class MovesOwners[Settings: PlacementSettings](Strategy[Settings]):
    """Moves experts to other owners between iterations, by loads that are means over all their copies.

    Ranks with copies of the same experts must decide alike, but their histories differ. So answers depend on
    the arguments and on earlier answers, and not on what :meth:`Strategy.before_gate` got.
    """

    moves_owners = True

    @abstractmethod
    def reshards_at(self, iteration: int) -> bool:
        """Whether to reconsider owners after so many iterations; asked only if ``moves_owners``."""

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """New owners for all layers of a pipeline stage, or the present ones; by default layer by layer.

        ``load_LE`` has the mean load of every expert in an iteration, float ``[L, E]``.
        """
        device_LE = owners.device_LE.copy()
        for index, context in enumerate(contexts):
            context = replace(context, owner_E=owners.device_LE[index])
            device_LE[index] = self.reshard_layer(context, load_LE[index])
        return owners.with_owners(device_LE)

    def reshard_layer(self, context: LayerContext, load_E: np.ndarray) -> np.ndarray:
        """New owners of one layer, integers ``[E]``; every device keeps its number of experts.

        ``load_E`` has mean loads of an iteration.
        """
        return context.owner_E


class ResidentReplicas[Settings: PlacementSettings](Strategy[Settings]):
    """Has replicas with Parameters and optimizer states of their own; it sets ``resident_slots``."""

    replica_life = ReplicaLife.RESIDENT

    @abstractmethod
    def replicates_at(self, iteration: int) -> bool:
        """Whether to reconsider resident replicas after so many iterations."""

    @abstractmethod
    def replicate(self, context: LayerContext, load_DE: np.ndarray) -> ExpertPlacement:
        """A layer's next placement, with the same owners; ``context.placement`` itself for no change.

        ``load_DE`` has mean loads of an iteration, float ``[D, E]``, as for :class:`MovesOwners`.
        """


class MeasuredReplicas[Settings: SlotKeys](Strategy[Settings]):
    """Selects replicas by measured costs, in slots whose number is given or measured."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.profile_iterations, self.overlaps = profile_iterations(), settings.overlap
        self._plans = LastResults[LayerPlan]()

    def slots(self, context: LayerContext) -> int:
        """Most replicas of a layer on a device: given or measured; before that, as many as it owns."""
        if self.settings.slots is not None:
            return self.settings.slots
        if context.profile is not None:
            return context.profile.memory_capacity
        return -(-context.num_experts // context.num_devices)

    def limits(self, context: LayerContext) -> str:
        """The largest numbers of replicas on a device and their origin, for the log."""
        origin = "given" if self.settings.slots is not None else "measured"
        by_life = self.slots_by_life(context)
        in_pass = f", or {by_life[ReplicaLife.LAYER_PASS]} for a pass" if len(by_life) > 1 else ""
        return f"slots m = {by_life[self.replica_life]}{in_pass} ({origin})"


class ReplicasAfterGate[Settings: SlotKeys](MeasuredReplicas[Settings]):
    """Selects the replicas of every micro-batch after the gate, from its exact counts."""

    replica_life = ReplicaLife.MICRO_BATCH

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """A plan without replicas, because the exact counts are not known before the gate."""
        return LayerPlan.owners_only(context, each_micro_batch=True)

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """:meth:`exact_plan` for the counts of this micro-batch, as soon as costs are measured."""
        if context.profile is None:
            return plan
        return self._plans.of(
            context.layer, (context, plan), counts_DE, lambda: self.exact_plan(context, counts_DE, plan)
        )

    @abstractmethod
    def exact_plan(self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan) -> LayerPlan:
        """The plan for the counts ``[D, E]`` of one micro-batch, or ``plan``, which has no replicas."""

    def plan_by_quotas(self, tokens_ED: np.ndarray, context: LayerContext) -> LayerPlan:
        """The plan in which each device computes so many pairs of each expert, int64 ``[E, D]``."""
        placement = ExpertPlacement(context.owner_E, context.placement.present_ED | (tokens_ED > 0))
        return self.plan_of(placement, context, each_micro_batch=True, tokens_ED=tokens_ED)


@contextmanager
def mistakes_named(strategy: Strategy, call: str) -> Iterator[None]:
    """Turn an exception of another package's strategy into one line that names the package.

    Raises:
        ConfigurationError: The strategy raised an exception in ``call``.
    """
    try:
        yield
    except Exception as error:
        if strategy.package == SHIPPED or isinstance(error, ConfigurationError):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigurationError(
            f"{type(strategy).__name__} of package {strategy.package} failed in {call}: {reason}; correct "
            "the strategy, or use another one"
        ) from error
