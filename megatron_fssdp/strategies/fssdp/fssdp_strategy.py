"""FSSDP: replicates the experts that had the highest loads in the last iterations (Hecate §4).

Shape letters: D devices, E experts, L MoE layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from megatron_fssdp.planning.cost.layer_seconds import moving_seconds
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.search import LEAST_SAVING, plan_materialization
from megatron_fssdp.strategies.fssdp import FssdpSettings, PlanSource
from megatron_fssdp.strategies.fssdp.exact_plans import (
    MOST_PRICED,
    WINDOW,
    SourceChoice,
    corrected,
    of_micro_batch,
)
from megatron_fssdp.strategies.fssdp.hecate_algorithms import (
    calibration_candidates,
    heterogeneous_sharding,
    sparse_materialization,
)
from megatron_fssdp.strategies.fssdp.kept_searches import KeptSearches
from megatron_fssdp.strategies.layer_plan import LastResults, LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import early_share, fastest, plan_price
from megatron_fssdp.strategies.strategy import MeasuredReplicas, MovesOwners


class FssdpStrategy(MeasuredReplicas[FssdpSettings], MovesOwners[FssdpSettings]):
    """``fssdp``: makes a new placement in each iteration, from the mean of the last :data:`WINDOW` loads."""

    window = WINDOW
    shares_plans = True

    def __init__(self, settings: FssdpSettings) -> None:
        super().__init__(settings)
        self._is_hecate = settings.planner == "hecate"
        self._searches = KeptSearches(self.slots_by_life, settings.overlap)
        self._made: dict[int, tuple[LayerContext, np.ndarray, LayerPlan]] = {}
        """Each layer's last plan, which serves until its context changes, or a search for other loads."""
        self._owners = LastResults[OwnerMap]()
        self._sources: dict[int, SourceChoice] = {}
        self._goes_by_seconds = settings.overlap_degree is None and not self._is_hecate
        """Whether modelled seconds decide about replicas and owners once costs are measured."""
        is_limited = settings.slots is not None and settings.overlap_degree is not None
        if is_limited and not self._is_hecate and not self.travel.compares_prices:
            self.profile_iterations = 0
        if settings.rematerialize:
            self.replica_life = ReplicaLife.LAYER_PASS
        elif settings.planned_from == "each":
            self.replica_life = ReplicaLife.MICRO_BATCH
        self.splits = self._goes_by_seconds and settings.overlap
        self.moves_owners = settings.reshard_interval > 0

    def overlap_degree(self, context: LayerContext) -> int:
        """Largest number of experts of the layer that may have replicas (Hecate, Alg. 1, t)."""
        degree = self.settings.overlap_degree
        if degree is None and context.profile is not None:
            degree = context.profile.overlap_degree(context.topology)
        return context.num_experts if degree is None else min(degree, context.num_experts)

    def slots_by_life(self, context: LayerContext) -> dict[ReplicaLife, int]:
        """Most replicas of a layer on a device that stay for an iteration, and most for each pass (ours).

        Without any key that says it, both are measured, and every layer has the life that costs less. The
        iterations that were measured ran with replicas for a pass, so as many fit at least.
        """
        settings, profile, given = self.settings, context.profile, super().slots(context)
        is_told = settings.slots is not None or settings.rematerialize is not None
        if profile is None or profile.mixed_capacity is None or is_told or not self._goes_by_seconds:
            return {self.replica_life: given}
        kept, in_pass, _ = profile.mixed_capacity
        if not kept:
            in_pass = max(in_pass, super().slots(replace(context, profile=None)))
        if in_pass <= kept:
            return {self.replica_life: given}
        return {ReplicaLife.ITERATION: kept, ReplicaLife.LAYER_PASS: in_pass}

    def slots(self, context: LayerContext) -> int:
        """Most replicas of a layer on a device: given or measured; before that, as many as it owns."""
        return max(self.slots_by_life(context).values())

    def limits(self, context: LayerContext) -> str:
        """The overlap degree and the slots, with their origin, as a text for the log."""
        how = "given" if self.settings.overlap_degree is not None else "measured"
        if self._goes_by_seconds:
            how += "; experts are replicated by seconds"
        return f"overlap degree t = {self.overlap_degree(context)} ({how}), {super().limits(context)}"

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Select replicas for the predicted loads, by Hecate's Alg. 1 or by our search within its limits.

        If costs are measured and ``overlap_degree`` is not set, our search minimizes modelled seconds;
        otherwise the highest device load. Without a load history, every expert stays with its owner at first.
        """
        if not (self._goes_by_seconds and context.profile is not None):
            # Alg. 1 is the paper's algorithm, so it gets the paper's prediction: the mean of the window.
            load_DE = history.mean_DE() if self._is_hecate else history.forecast_DE()
            is_possible = self.settings.slots or (self.settings.slots is None and context.profile is None)
            is_first = history.is_empty and is_possible and not (self._is_hecate or context.shares_evenly)
            return self._limited(context, load_DE, corrects=bool(is_first))
        plan, source = self._by_past(context, history), self.settings.planned_from
        if source == "by_price" and not context.shares_evenly:
            choice = self._sources.setdefault(context.layer, SourceChoice())
            source = choice.of(context, history, plan, partial(self._slots_of, context, plan))
            source = "first" if history.is_empty else source
        if source == "each":
            return replace(context.owners_only, each_micro_batch=True, gather_ahead=self.settings.overlap)
        return replace(plan, corrects=True) if source == "first" else plan

    def _by_past(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """The plan with the fewest modelled seconds under the predicted loads; costs are measured."""
        result = self._searches.of(context, history.forecast_DE(), history.num_seen)
        made = self._made.get(context.layer)
        if made is not None and made[0] is context and made[1] is result.load_DE:
            return made[2]
        in_pass = result.life is ReplicaLife.LAYER_PASS
        plan = self.plan_of(result.placement, context, rematerialize=in_pass)
        if plan.placement.num_replicas:
            plan = with_cheaper_shares(plan, context, history)
            if self.splits and not in_pass:
                num_pairs = float(history.mean_E().sum())
                plan = replace(plan, early=early_share(plan.transfer, num_pairs, context))
        self._made[context.layer] = context, result.load_DE, plan
        return plan

    def asks_after_gate(self, layer: int) -> bool:
        """Whether all plans are calibrated (planner ``hecate``) or corrected."""
        return self._is_hecate or self.settings.planned_from == "first"

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """Plan by the exact counts (ours), or calibrate the plan (Hecate §4.2).

        The first iteration of a run is planned whatever the price says: with all of the imbalance, the most
        loaded device needs the most memory. Candidates of a calibration are priced as if all micro-batches
        had these counts, and pay for the gather of their additions.
        """
        times = num_micro_batches
        if plan.each_micro_batch:
            return of_micro_batch(plan, counts_DE, context, slots=self._slots_of(context, plan, "each"))
        if not self._is_hecate:
            if not (self._goes_by_seconds and context.profile is not None):
                return self._limited(context, counts_DE)
            slots = self._slots_of(context, plan, "first")
            return corrected(plan, counts_DE, context, slots=slots, times=times)
        if context.profile is None:
            return plan
        grown = calibration_candidates(plan.placement, counts_DE, context.topology, **self._limits(context))
        plans = [plan, *(replace(plan.placed(placement, context), corrects=False) for placement in grown)]
        return fastest(plans, times * counts_DE, context, times, planned=plan)

    def _slots_of(self, context: LayerContext, plan: LayerPlan, source: PlanSource) -> int:
        """Most replicas on a device in a plan from exact counts, in place of ``plan``; 0 if impossible."""
        if source != "each":
            return self.slots_by_life(context).get(plan.life, self.slots(context))
        if context.delays_gradients or self.settings.rematerialize:
            return 0
        mixed, given = context.costs.mixed_capacity, self.settings.slots
        return self.slots(context) if given is not None or mixed is None else mixed[2]

    def _limits(self, context: LayerContext) -> dict[str, int]:
        return {"overlap_degree": self.overlap_degree(context), "slots": self.slots(context)}

    def _limited(self, context: LayerContext, load_DE: np.ndarray, corrects: bool = False) -> LayerPlan:
        """The plan by Alg. 1 or by the lowest device load, within overlap degree and slots."""
        owner_E, topology, limits = context.owner_E, context.topology, self._limits(context)
        if self._is_hecate:
            placement = sparse_materialization(owner_E, load_DE.sum(axis=0), topology, **limits)
        else:
            placement = plan_materialization(owner_E, load_DE, topology, **limits)
        # Until free memory is measured, one layer at a time has replicas.
        is_unmeasured = self.settings.slots is None and context.profile is None
        in_pass = self.settings.rematerialize or self.settings.planned_from == "each" or is_unmeasured
        return self.plan_of(placement, context, rematerialize=bool(in_pass), corrects=corrects)

    def reshards_at(self, iteration: int) -> bool:
        """At each ``reshard_interval``; if seconds decide, also as soon as a window of loads is known."""
        is_first = self._goes_by_seconds and iteration == WINDOW
        return is_first or (iteration > 0 and iteration % self.settings.reshard_interval == 0)

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """New owners from the recent loads of all layers together (Hecate §4.3, Alg. 2).

        If modelled seconds decide, owners move if this saves more of them until the next time than it takes.
        """
        profile = contexts[0].profile
        if not load_LE.any() or (self._goes_by_seconds and profile is None):  # Costs will be measured soon.
            return owners
        return self._owners.of(
            0, (owners, profile), load_LE, lambda: self._resharded(contexts, load_LE, owners)
        )

    def _resharded(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        profile, topology = contexts[0].profile, contexts[0].topology
        degree = min(self.overlap_degree(context) for context in contexts)
        new = heterogeneous_sharding(owners, load_LE, topology, overlap_degree=degree)
        if not self._goes_by_seconds or profile is None:
            return new
        layers = zip(contexts, owners.device_LE, new.device_LE, load_LE, strict=True)
        saved_s = sum(
            self._seconds(context, old_E, load_E) - self._seconds(context, new_E, load_E)
            for context, old_E, new_E, load_E in layers
            if not np.array_equal(old_E, new_E)
        )
        moving_s = moving_seconds(owners.device_LE, new.device_LE, topology, profile)
        return new if self.settings.reshard_interval * saved_s > moving_s else owners

    def _seconds(self, context: LayerContext, owner_E: np.ndarray, load_E: np.ndarray) -> float:
        """Modelled seconds with other owners and their replicas, if every source sends equally much."""
        load_DE = np.tile(load_E / context.num_devices, (context.num_devices, 1))
        return self._searches.searched(replace(context, owner_E=owner_E), load_DE).planned_s


def with_cheaper_shares(plan: LayerPlan, context: LayerContext, history: LoadHistory) -> LayerPlan:
    """The plan, in which the device shares tokens out evenly or by exact counts (ours).

    Exact dispatch makes device loads even in every micro-batch, but takes another gather of counts and the
    time to compute shares. The price underestimates that all ranks wait for each other once more, so exact
    dispatch must save :data:`LEAST_SAVING` of the modelled seconds. What counts are single micro-batches of
    the last iteration, because their sum hides how loads drift.
    """
    # Tokens that are sent once are priced as if they were divided evenly.
    is_possible = context.costs.sent_choices is None and not context.shares_evenly
    if not is_possible or history.is_empty:
        return plan
    exact, counts = replace(plan, dispatch_policy="exact"), history.iterations_like(MOST_PRICED)
    even_s, exact_s = (
        sum(plan_price(tried, counts_DE, context).seconds for counts_DE in counts) for tried in (plan, exact)
    )
    return exact if exact_s < (1 - LEAST_SAVING) * even_s else plan
