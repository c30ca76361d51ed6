"""FasterMoE: the hottest experts of each micro-batch on all devices (§4.1).

Shape letters: D devices, E experts.
"""

import numpy as np

from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.strategies.fastermoe import FastermoeSettings
from megatron_fssdp.strategies.fastermoe.shadow_selection import ShadowingCosts, select_shadows
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.strategy import ReplicasAfterGate


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
