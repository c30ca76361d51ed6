"""Pro-Prophet: replicas on the devices from which most of an expert's tokens come.

Shape letters: D devices, E experts.
"""

from dataclasses import replace

import numpy as np

from megatron_fssdp.planning.arrays import doubling
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import early_share, fastest
from megatron_fssdp.strategies.prophet import ProphetSettings
from megatron_fssdp.strategies.prophet.prophet_planner import ProphetModel, greedy_placements
from megatron_fssdp.strategies.strategy import MeasuredReplicas

PROPHET_BALANCE = 0.5
"""Largest accepted difference of device loads, in units of the mean load of an expert (Eq. 7, alpha)."""


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
