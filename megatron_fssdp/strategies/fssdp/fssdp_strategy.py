"""FSSDP: replicates the experts that had the highest loads in the last iterations (Hecate §4)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_fssdp.config.strategy.fssdp_settings import FssdpSettings
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.papers.calibration import (
    MaterializationPlanner,
    calibrated_placement,
    sparse_materialization_by_source,
)
from megatron_fssdp.planning.papers.heterogeneous_sharding import heterogeneous_sharding
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.search import LayerSearch, layer_search, plan_materialization
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.fssdp.kept_placements import KeptPlacements
from megatron_fssdp.strategies.fssdp.priced_dispatch import PricedDispatch
from megatron_fssdp.strategies.fssdp.priced_reshard import ReshardClock, paying_owners
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.owner_moves import exchange_s
from megatron_fssdp.strategies.replica_limits import described_slots, slots_of
from megatron_fssdp.strategies.split_transfers import split_of
from megatron_fssdp.strategies.strategy import Strategy


class FssdpStrategy(Strategy[FssdpSettings]):
    """``fssdp``: makes a new placement in each iteration, from the mean of the last ``window`` loads."""

    def __init__(self, settings: FssdpSettings) -> None:
        super().__init__(settings)
        self._planner: MaterializationPlanner = (
            sparse_materialization_by_source if settings.planner == "hecate" else plan_materialization
        )
        self._kept = KeptPlacements(2 * settings.window)
        self._dispatch = PricedDispatch()
        self._clock = ReshardClock(settings.window, settings.reshard_interval)

    @property
    def window(self) -> int:
        """Length of the sliding window of loads (Hecate §4.2, w)."""
        return self.settings.window

    @property
    def profile_iterations(self) -> int:
        """Iterations to measure; 0 if t and m are given, and nothing else needs costs."""
        settings = self.settings
        is_limited = settings.slots is not None and settings.overlap_degree is not None
        compares = settings.compares_prices
        needs_profile = not is_limited or settings.calibrate or bool(settings.split) or compares
        return settings.profile_iterations if needs_profile else 0

    @property
    def replica_life(self) -> ReplicaLife:
        """One iteration, or one pass of a layer under re-materialization (Hecate §4.2)."""
        return ReplicaLife.LAYER_PASS if self.settings.rematerialize else ReplicaLife.ITERATION

    @property
    def overlaps(self) -> bool:
        """Whether transfers may run beside compute: the setting ``overlap``."""
        return self.settings.overlap

    @property
    def moves_owners(self) -> bool:
        """Whether experts may change their owners: False if ``reshard_interval`` is 0."""
        return self.settings.reshard_interval > 0

    @property
    def _goes_by_seconds(self) -> bool:
        """Whether modelled seconds decide about replicas and owners once costs are measured."""
        return self.settings.overlap_degree is None and self.settings.planner == "balanced"

    @property
    def _prices_dispatch(self) -> bool:
        """Whether modelled seconds decide between even and exact dispatch."""
        # The deduplicated exchange is priced as if tokens were divided evenly.
        is_open = self.settings.dispatch_policy is None and self.exchange != "deduplicated"
        return is_open and self._goes_by_seconds

    @property
    def splits(self) -> bool:
        """Whether transfers travel in two parts where the compute before the layer does not hide them."""
        settings = self.settings
        split = self._goes_by_seconds if settings.split is None else settings.split
        # The runtime splits nothing under the smart schedule, so the price must not either.
        return split and settings.overlap and not settings.smart_schedule

    def reshards_at(self, iteration: int) -> bool:
        """Whether owners are reconsidered now.

        If modelled seconds decide, intervals adapt to the moves (:class:`ReshardClock`) and are at most
        ``reshard_interval``. Otherwise this is every multiple of ``reshard_interval`` that is not 0.
        """
        interval = self.settings.reshard_interval
        if interval == 0:
            return False
        if self._goes_by_seconds:
            return self._clock.is_due(iteration)
        return iteration > 0 and iteration % interval == 0

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """New owners from the recent loads of all layers together (Hecate §4.3, Alg. 2).

        If modelled seconds decide, owners move only as far as this saves more seconds than the move takes.
        Where loads have just jumped, they will jump again: the savings of such a layer last only as long as
        its loads have lasted.

        Args:
            contexts: Data of the layers, in the order of the map.
            load_LE: Mean load of every expert in an iteration, float ``[L, E]``.
            owners: The present owners.
        """
        if not load_LE.any():
            return owners
        degree = min(self.overlap_degree(context) for context in contexts)
        new = heterogeneous_sharding(owners, load_LE, contexts[0].topology, overlap_degree=degree)
        profile, topology = contexts[0].profile, contexts[0].topology
        if not self._goes_by_seconds:
            return new
        if profile is None:  # Costs will be measured soon.
            return owners
        lasting = self._clock.lasting_iterations

        def layer_s(layer: int, owner_E: np.ndarray) -> float:
            since_jump = contexts[layer].num_since_jump
            share = 1.0 if since_jump is None else min(1.0, since_jump / lasting)
            return share * self._seconds(contexts[layer], owner_E, load_LE[layer])

        paying = paying_owners(
            owners,
            new,
            layer_s=layer_s,
            moving_s=lambda to: exchange_s(owners.device_LE, to.device_LE, profile, topology),
            num_iterations=lasting,
        )
        self._clock.reconsidered(moved=bool(owners.moves_to(paying)))
        return paying

    def _seconds(self, context: LayerContext, owner_E: np.ndarray, load_E: np.ndarray) -> float:
        """Modelled seconds of a layer under other owners and the replicas that they would get.

        Args:
            context: Data of the layer; costs are measured.
            owner_E: Owners to consider, integers ``[E]``.
            load_E: Mean load of every expert in an iteration; every source sends an equal part of it.
        """
        load_DE = np.tile(load_E / context.num_devices, (context.num_devices, 1))
        search = self._search(replace(context, owner_E=owner_E), load_DE)
        return search.best_placement(slots=self.slots(context), most_replicated=context.num_experts)[1]

    def _search(self, context: LayerContext, counts_DE: np.ndarray) -> LayerSearch:
        """The search for replicas under counts of an iteration ``[D, E]``; costs are measured."""
        assert context.profile is not None
        return layer_search(
            context.owner_E,
            counts_DE,
            context.topology,
            context.profile,
            rematerialize=self.settings.rematerialize,
            hides=self.settings.overlap,
        )

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Select replicas for the predicted loads, by Hecate's Alg. 1 or by our search within its limits.

        If costs are measured and ``overlap_degree`` is not set, our search minimizes modelled seconds instead
        of the highest device load. If there is no load history, every expert stays only with its owner.
        """
        settings = self.settings
        # Alg. 1 is the paper's algorithm, so it gets the paper's prediction: the plain mean of the window.
        load_DE = history.forecast_DE() if settings.planner == "balanced" else history.mean_DE()
        if self._goes_by_seconds and context.profile is not None:
            search = self._search(context, load_DE)
            number, slots = history.num_seen, self.slots(context)
            placement, _ = self._kept.best_placement(context.layer, number, search, slots)
        else:
            placement = self._planner(
                context.owner_E,
                load_DE,
                context.topology,
                overlap_degree=self.overlap_degree(context),
                slots=self.slots(context),
            )
        plan = self._plan_of(placement, context, settings.dispatch_policy or "even")
        if self._prices_dispatch and context.profile is not None:
            plan = replace(plan, dispatch_policy=self._dispatch.policy(plan, context, history))
        if self.splits and placement.num_replicas:
            plan = replace(plan, split=split_of(plan.transfer, float(history.mean_E().sum()), context))
        return plan

    def asks_after_gate(self, layer: int) -> bool:
        """Whether plans are calibrated (Hecate §4.2): only if ``calibrate`` is on."""
        return self.settings.calibrate

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """Add replicas to free slots for the exact counts, if that saves seconds (Hecate §4.2)."""
        profile = context.profile
        if profile is None or not self.settings.calibrate:
            return plan
        placement = calibrated_placement(
            plan.placement,
            counts_DE,
            context.topology,
            planner=self._planner,
            overlap_degree=self.overlap_degree(context),
            slots=self.slots(context),
            profile=profile,
            life=plan.life,
            num_micro_batches=num_micro_batches,
            dispatch_policy=plan.dispatch_policy,
            hides=plan.gather_ahead,
        )
        return plan if placement is None else self._plan_of(placement, context, plan.dispatch_policy)

    def overlap_degree(self, context: LayerContext) -> int:
        """Largest number of experts of the layer that may have replicas (Hecate, Alg. 1, t)."""
        degree = self.settings.overlap_degree
        if degree is None and context.profile is not None:
            degree = context.profile.overlap_degree(context.topology)
        return context.num_experts if degree is None else min(degree, context.num_experts)

    def slots(self, context: LayerContext) -> int:
        """Largest number of replicas of a layer on a device (Hecate, Alg. 1, m)."""
        return slots_of(self.settings.slots, context)

    def limits(self, context: LayerContext) -> str:
        """The overlap degree and the slots, with their origin, as a text for the log."""
        settings = self.settings
        how = "given" if settings.overlap_degree is not None else "measured"
        if settings.overlap_degree is None and settings.planner == "balanced":
            how += "; experts are replicated by seconds"
        degree = self.overlap_degree(context)
        return f"overlap degree t = {degree} ({how}), {described_slots(settings.slots, context)}"

    def _plan_of(
        self, placement: ExpertPlacement, context: LayerContext, dispatch_policy: DispatchPolicy
    ) -> LayerPlan:
        return LayerPlan(
            placement,
            two_level_transfer(placement, context.topology),
            gather_ahead=self.settings.overlap,
            rematerialize=self.settings.rematerialize,
            dispatch_policy=dispatch_policy,
        )
