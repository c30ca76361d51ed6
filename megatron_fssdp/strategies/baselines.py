"""Strategies to compare with: plain expert parallelism, ``quota``, and those that papers describe.

Shape letters: D devices, E experts.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from megatron_fssdp.config.strategy.shipped_settings import (
    FastermoeSettings,
    FlexmoeSettings,
    ProphetSettings,
    QuotaSettings,
    SmartmoeSettings,
)
from megatron_fssdp.config.strategy.strategy_settings import PlacementSettings, profile_iterations
from megatron_fssdp.planning.cost.layer_seconds import moving_seconds
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.papers.flexmoe_planner import next_resident_placement
from megatron_fssdp.planning.papers.owner_planners import check_exchangeable, permuted_owners
from megatron_fssdp.planning.papers.prophet_planner import ProphetModel, greedy_placements
from megatron_fssdp.planning.papers.shadow_selection import ShadowingCosts, select_shadows
from megatron_fssdp.planning.papers.sparse_materialization import doubling
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.quotas import quota_assignment
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.layer_plan import (
    LastPlans,
    LayerContext,
    LayerPlan,
    early_share,
    exchange_s,
    fastest,
    plan_price,
)
from megatron_fssdp.strategies.strategy import (
    MeasuredReplicas,
    MovesOwners,
    ReplicasAfterGate,
    ResidentReplicas,
    Strategy,
)

FLEXMOE_THRESHOLD = 1.1
"""Max/mean device load above which replicas are added or exchanged: below, steps save hardly anything."""

FLEXMOE_STEPS = 16
"""Most expansions, and most migrations, of a layer at a time; more are seldom needed at an interval."""

PROPHET_BALANCE = 0.5
"""Largest accepted difference of device loads, in units of the mean load of an expert (Eq. 7, alpha)."""


class EpStrategy[Settings: PlacementSettings](Strategy[Settings]):
    """``ep``: every expert stays with its owner. It is also the base of strategies without replicas."""

    overlaps = False  # The strategy has no transfers.

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if self.travel.compares_prices:
            self.profile_iterations = profile_iterations()

    def may_replicate(self, layer: int) -> bool:
        """False: no layer has replicas."""
        return False

    def slots(self, context: LayerContext) -> int:
        """Zero: the strategy has no replicas."""
        return 0

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """A plan without replicas, independent of the loads."""
        return LayerPlan.owners_only(context)


class QuotaStrategy(ReplicasAfterGate[QuotaSettings]):
    """``quota``: minimizes the highest device load of each micro-batch (ours, after ECHO and UltraEP)."""

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """A plan with the quotas of this micro-batch, if costs are measured and it saves modelled seconds."""
        return self._plans.of(context, plan, counts_DE, lambda: self._quotas(context, counts_DE, plan))

    def _quotas(self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan) -> LayerPlan:
        if context.profile is None:
            return plan
        slots = self.slots(context)
        tokens_ED = quota_assignment(context.owner_E, counts_DE, context.topology, slots=slots)
        placement = ExpertPlacement(context.owner_E, plan.placement.present_ED | (tokens_ED > 0))
        if not placement.num_replicas:
            return plan
        quotas = self.plan_of(placement, context, each_micro_batch=True, tokens_ED=tokens_ED)
        return fastest((plan, quotas), counts_DE, context, times=1)


class FastermoeStrategy(ReplicasAfterGate[FastermoeSettings]):
    """``fastermoe``: replicates shadows on all devices, selected by the exact counts (FasterMoE §4.1)."""

    def after_gate(
        self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int
    ) -> LayerPlan:
        """A plan with the shadows of this micro-batch (FasterMoE, Alg. 1), as soon as costs are measured."""
        return self._plans.of(context, plan, counts_DE, lambda: self._shadows(context, counts_DE, plan))

    def _shadows(self, context: LayerContext, counts_DE: np.ndarray, plan: LayerPlan) -> LayerPlan:
        profile = context.profile
        if profile is None:
            return plan
        costs = ShadowingCosts(
            token_bytes=profile.token_bytes,
            expert_bytes=profile.expert_bytes,
            flops_per_token=profile.flops_per_token,
            flops_per_s=profile.cluster.expert_flops_per_s,
            bytes_per_s=1 / profile.slowest_link(context.topology).beta_s_per_byte,
        )
        if self.settings.latency == "authors":
            costs = costs.of_the_authors(context.num_devices)
        shadowed = select_shadows(
            *(context.owner_E, counts_DE, costs),
            most=self.slots(context),
            remaining_exchange=self.settings.latency == "complete",
        )
        if not shadowed:
            return plan
        present_ED = plan.placement.present_ED.copy()
        present_ED[list(shadowed)] = True
        placement = ExpertPlacement(context.owner_E, present_ED)
        return self.plan_of(placement, context, each_micro_batch=True)


class ProphetStrategy(MeasuredReplicas[ProphetSettings]):
    """``prophet``: places replicas on the devices from which most of an expert's tokens come (Pro-Prophet).

    Tokens of the other devices go to the expert's owner. The last iteration's loads decide (§IV-C, locality).
    """

    shares_plans = True

    def __init__(self, settings: ProphetSettings) -> None:
        super().__init__(settings)
        self.splits = settings.overlap  # §V-B

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """The plan for the last loads; without replicas until costs are known."""
        if context.profile is None or history.is_empty:
            return LayerPlan.owners_only(context)
        counts_DE = history.counts_DE(0)
        return self._plans.of(context, None, counts_DE, lambda: self._planned(context, counts_DE))

    def _planned(self, context: LayerContext, counts_DE: np.ndarray) -> LayerPlan:
        most, left_out = context.num_devices - 1, self.settings.left_out
        cases = [0, *doubling(most)] if left_out is None else [min(left_out, most)]
        found = greedy_placements(
            *(context.owner_E, counts_DE, self._model(context), cases),
            balance=PROPHET_BALANCE,
            slots=self.slots(context),
        )
        plans = [self._plan_of(placement, counts_DE, context) for placement in found]
        if left_out is not None:
            return plans[0]
        # By Eq. 4, an expert with fewer replicas costs less, but a link between nodes carries it only once.
        # So the price over the real links selects.
        return fastest([LayerPlan.owners_only(context), *plans], counts_DE, context, times=1)

    def _plan_of(self, placement: ExpertPlacement, counts_DE: np.ndarray, context: LayerContext) -> LayerPlan:
        if not placement.num_replicas:
            return LayerPlan.owners_only(context)
        plan = self.plan_of(placement, context, dispatch_policy="owner")
        if self.splits:
            plan = replace(plan, early=early_share(plan.transfer, float(counts_DE.sum()), context))
        return plan

    def _model(self, context: LayerContext) -> ProphetModel:
        profile, topology = context.costs, context.topology
        link = profile.slowest_link(topology)
        # The devices of a node share its link to other nodes, and a transfer of one expert crosses it once.
        num_sharing = topology.num_devices // topology.num_nodes if link is profile.cluster.inter else 1
        return ProphetModel(
            num_devices=topology.num_devices,
            input_bytes=profile.token_bytes,
            expert_bytes=profile.expert_bytes,
            gradient_bytes=profile.reduced_bytes,
            bytes_per_s=1 / link.beta_s_per_byte / num_sharing,
            inputs_per_s=profile.cluster.expert_flops_per_s / profile.flops_per_token,
            non_expert_s=profile.non_moe_s,
            overlaps=self.settings.overlap,
            transfer_bytes_per_s=1 / link.beta_s_per_byte,
            start_s=link.alpha_s,
        )


class SmartmoeStrategy(EpStrategy[SmartmoeSettings], MovesOwners[SmartmoeSettings]):
    """``smartmoe``: permutes owners at an interval, without replicas (Hecate §2.3, §5.1)."""

    def __init__(self, settings: SmartmoeSettings) -> None:
        super().__init__(settings)
        self.window, self.profile_iterations = settings.window, profile_iterations()

    def check(self, context: LayerContext) -> None:
        """Refuse layers that exchanges of owners cannot balance, by a ValueError."""
        check_exchangeable(context.owner_E, context.num_devices)

    def reshards_at(self, iteration: int) -> bool:
        """Whether ``iteration`` is a multiple of ``reshard_interval`` and not 0."""
        return iteration > 0 and iteration % self.settings.reshard_interval == 0

    def reshard(self, contexts: Sequence[LayerContext], load_LE: np.ndarray, owners: OwnerMap) -> OwnerMap:
        """New owners for all layers; the devices own equally many experts of each layer afterwards.

        Owners of a checkpoint may be uneven. All such layers become even at one time, so that no device needs
        more slots.
        """
        device_LE = owners.device_LE.copy()
        for owner_E in device_LE:
            if np.ptp(np.bincount(owner_E, minlength=owners.num_devices)):
                owner_E[:] = even_owners(owners.num_experts, owners.num_devices)
        if not np.array_equal(device_LE, owners.device_LE):
            return owners.with_owners(device_LE)
        return super().reshard(contexts, load_LE, owners)

    def reshard_layer(self, context: LayerContext, load_E: np.ndarray) -> np.ndarray:
        """New owners of one layer, or the present ones if an exchange would not pay until the next one."""
        old_E, profile = context.owner_E, context.profile
        if profile is None or not load_E.any() or context.num_experts < context.num_devices:
            # With at most one expert on a device, an exchange would only change which device has it.
            return old_E
        new_E = permuted_owners(old_E, load_E, context.num_devices)
        # Every source is assumed to send an expert equally much.
        counts_DE = np.tile(np.rint(load_E / context.num_devices).astype(np.int64), (context.num_devices, 1))
        old_s, new_s = (
            plan_price(LayerPlan.owners_only(of), counts_DE, of).seconds
            for of in (context, replace(context, owner_E=new_E))
        )
        saved_s = self.settings.reshard_interval * (old_s - new_s)
        return new_E if saved_s > exchange_s(old_E, new_E, profile, context.topology) else old_E


class FlexmoeStrategy(ResidentReplicas[FlexmoeSettings]):
    """``flexmoe``: expands, shrinks and migrates resident replicas at an interval (Hecate §2.3, §5.1)."""

    def __init__(self, settings: FlexmoeSettings) -> None:
        super().__init__(settings)
        self.window, self.profile_iterations = settings.window, profile_iterations()
        self.overlaps, self.resident_slots = settings.overlap, settings.slots
        self._plans = LastPlans()

    def slots(self, context: LayerContext) -> int:
        """Largest number of replicas of a layer on a device."""
        return self.resident_slots

    def replicates_at(self, iteration: int) -> bool:
        """Whether ``iteration`` is a multiple of ``placement_interval`` and not 0."""
        return iteration > 0 and iteration % self.settings.placement_interval == 0

    def replicate(self, context: LayerContext, load_DE: np.ndarray) -> ExpertPlacement:
        """The present placement, changed in steps that save seconds until replicas are reconsidered."""
        present = context.placement
        if context.profile is None or not load_DE.any():
            return present
        counts_DE = np.rint(load_DE).astype(np.int64)

        @cache
        def layer_s(placement: ExpertPlacement) -> float:
            return plan_price(self._plan_of(placement, context), counts_DE, context).seconds

        def saving_s(before: ExpertPlacement, after: ExpertPlacement) -> float:
            saved_s = layer_s(before) - layer_s(after)
            return self.settings.placement_interval * saved_s - self.moving_s(context, before, after)

        return next_resident_placement(
            *(present, counts_DE, context.topology, saving_s),
            slots=self.settings.slots,
            threshold=FLEXMOE_THRESHOLD,
            most_steps=FLEXMOE_STEPS,
        )

    def moving_s(self, context: LayerContext, before: ExpertPlacement, after: ExpertPlacement) -> float:
        """Seconds in which owners send experts with their states to new replicas."""
        expert_P, device_P = np.nonzero(after.present_ED & ~before.present_ED)
        return moving_seconds(before.owner_E[expert_P], device_P, context.topology, context.costs)

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """A plan with the present resident replicas."""
        return self._plans.of(
            context, None, context.owner_E, lambda: self._plan_of(context.placement, context)
        )

    def _plan_of(self, placement: ExpertPlacement, context: LayerContext) -> LayerPlan:
        if not placement.num_replicas:
            return LayerPlan.owners_only(context)
        transfer = two_level_transfer(placement, context.topology)
        return LayerPlan(placement, transfer, gather_ahead=self.settings.overlap, resident=True)
