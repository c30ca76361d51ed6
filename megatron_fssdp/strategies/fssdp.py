"""FSSDP: replicate the experts that the last iterations used most (Hecate §4)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_fssdp.config.strategy_settings import FssdpSettings
from megatron_fssdp.planning.balanced.materialization_planner import plan_materialization
from megatron_fssdp.planning.balanced.priced_materialization import priced_materialization
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.papers.calibration import (
    MaterializationPlanner,
    calibrated_placement,
    sparse_materialization_by_source,
)
from megatron_fssdp.planning.papers.heterogeneous_sharding import heterogeneous_sharding
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.replica_limits import described_slots, slots_of
from megatron_fssdp.strategies.split_transfers import split_of
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan, Strategy


class FssdpStrategy(Strategy[FssdpSettings]):
    """``fssdp``: a fresh placement each iteration, from the mean of the last ``window`` loads."""

    def __init__(self, settings: FssdpSettings) -> None:
        super().__init__(settings)
        self._planner: MaterializationPlanner = (
            sparse_materialization_by_source if settings.planner == "hecate" else plan_materialization
        )

    @property
    def window(self) -> int:
        """Length of the sliding window of loads (Hecate §4.2, w)."""
        return self.settings.window

    @property
    def profile_iterations(self) -> int:
        """Iterations to measure: t and m where they are not given, costs for calibration and splits."""
        settings = self.settings
        is_limited = settings.slots is not None and settings.overlap_degree is not None
        needs_profile = not is_limited or settings.calibrate or settings.split
        return settings.profile_iterations if needs_profile else 0

    @property
    def replica_life(self) -> ReplicaLife:
        """An iteration, or a layer's pass with re-materialization (Hecate §4.2)."""
        return ReplicaLife.LAYER_PASS if self.settings.rematerialize else ReplicaLife.ITERATION

    @property
    def overlaps(self) -> bool:
        """As set."""
        return self.settings.overlap

    @property
    def moves_owners(self) -> bool:
        """Unless ``reshard_interval`` is 0."""
        return self.settings.reshard_interval > 0

    def reshards_at(self, iteration: int) -> bool:
        """Every ``reshard_interval`` iterations, not before the first of them is over."""
        interval = self.settings.reshard_interval
        return interval > 0 and iteration > 0 and iteration % interval == 0

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """Owners by the recent loads of all layers together (Hecate §4.3, Alg. 2)."""
        if not load_LE.any():
            return owners
        degree = min(self.overlap_degree(context) for context in contexts)
        return heterogeneous_sharding(owners, load_LE, contexts[0].topology, overlap_degree=degree)

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """Replicate by the predicted loads: Hecate's Alg. 1, or our search within its limits.

        Where costs are measured and no limit to the number of experts is set, our search looks for
        the fewest seconds instead of the most even load. Without any history yet, every expert stays
        with its owner.
        """
        settings, profile = self.settings, context.profile
        slots = self.slots(context)
        # Alg. 1 is the paper's, and so is what it looks at.
        load_DE = history.settled_mean_DE() if settings.planner == "balanced" else history.mean_DE()
        if profile is not None and settings.overlap_degree is None and settings.planner == "balanced":
            placement = priced_materialization(
                context.owner_E,
                load_DE,
                context.topology,
                slots=slots,
                profile=profile,
                rematerialize=settings.rematerialize,
                hides=settings.overlap,
            )
        else:
            placement = self._planner(
                context.owner_E,
                load_DE,
                context.topology,
                overlap_degree=self.overlap_degree(context),
                slots=slots,
            )
        plan = self._plan_of(placement, context)
        if not (settings.split and settings.overlap and placement.num_replicas):
            return plan
        return replace(plan, split=split_of(plan.transfer, float(history.mean_E().sum()), context))

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """Add replicas by the exact counts where that pays (Hecate §4.2, calibration)."""
        profile = context.profile
        if not self.settings.calibrate or profile is None:
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
            dispatch_policy=self.settings.dispatch_policy,
            hides=plan.gather_ahead,
        )
        return plan if placement is None else self._plan_of(placement, context)

    def overlap_degree(self, context: LayerContext) -> int:
        """Most experts of the layer that may be replicated (Hecate, Alg. 1, t)."""
        degree = self.settings.overlap_degree
        if degree is None and context.profile is not None:
            degree = context.profile.overlap_degree(context.topology)
        return context.num_experts if degree is None else min(degree, context.num_experts)

    def slots(self, context: LayerContext) -> int:
        """Extra expert slots a device has for one layer (Hecate, Alg. 1, m)."""
        return slots_of(self.settings.slots, context)

    def limits(self, context: LayerContext) -> str:
        """Overlap degree and slots."""
        settings = self.settings
        how = "given" if settings.overlap_degree is not None else "measured"
        if settings.overlap_degree is None and settings.planner == "balanced":
            how += "; experts are replicated by seconds"
        degree = self.overlap_degree(context)
        return f"overlap degree t = {degree} ({how}), {described_slots(settings.slots, context)}"

    def _plan_of(self, placement: ExpertPlacement, context: LayerContext) -> LayerPlan:
        return LayerPlan(
            placement,
            two_level_transfer(placement, context.topology),
            gather_ahead=self.settings.overlap,
            rematerialize=self.settings.rematerialize,
            dispatch_policy=self.settings.dispatch_policy,
        )
