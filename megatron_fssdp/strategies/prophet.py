"""Pro-Prophet: replicates experts on a subset of the devices, planned from an earlier iteration (§IV, §V)."""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.config.strategy_settings import ProphetSettings
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_traffic import DispatchTraffic
from megatron_fssdp.planning.cost.owner_traffic import OwnerTraffic
from megatron_fssdp.planning.cost.transfer_split import WHOLE
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.planning.papers.calibration import doubling
from megatron_fssdp.planning.papers.prophet_planner import ProphetLayer, ProphetModel
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.measured_replicas import MeasuredReplicas
from megatron_fssdp.strategies.plan_seconds import plan_seconds
from megatron_fssdp.strategies.split_transfers import split_of
from megatron_fssdp.strategies.strategy import LayerContext, LayerPlan


@dataclass(frozen=True, eq=False)
class _Kept:
    """A plan that is kept for several iterations.

    Attributes:
        plan: The plan.
        context: Data of the layer for which the plan was made.
        num_seen: Number of iterations in the load history at that time.
    """

    plan: LayerPlan
    context: LayerContext
    num_seen: int


class ProphetStrategy(MeasuredReplicas[ProphetSettings]):
    """``prophet``: places replicas on the devices from which most of an expert's tokens come.

    Tokens of the other devices go to the expert's owner.
    """

    def __init__(self, settings: ProphetSettings) -> None:
        super().__init__(settings)
        self._kept: dict[int, _Kept] = {}

    @property
    def window(self) -> int:
        """Number of iterations for which a plan is kept, so that it can be made again from its loads."""
        return self.settings.plan_interval

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """The plan of the last planning point (§IV-C, locality); without replicas until costs are known."""
        if context.profile is None or history.is_empty:
            return LayerPlan.owners_only(context)
        age = (history.num_seen - 1) % self.settings.plan_interval
        made_at = history.num_seen - age
        kept = self._kept.get(context.layer)
        if kept is None or kept.context is not context or kept.num_seen != made_at:
            counts_DE = history.counts_DE(age)
            kept = _Kept(self._planned(context, context.profile, counts_DE), context, made_at)
            self._kept[context.layer] = kept
        return kept.plan

    def _planned(self, context: LayerContext, profile: LayerProfile, counts_DE: np.ndarray) -> LayerPlan:
        most, left_out = context.num_devices - 1, self.settings.left_out
        layer = ProphetLayer(context.owner_E, counts_DE, context.num_devices)
        found = [
            layer.plan(
                _model(profile, context.topology, min(number, most), overlaps=self.settings.overlap),
                balance=self.settings.balance,
                slots=self.slots(context),
            ).placement
            for number in ([0, *doubling(most)] if left_out is None else [left_out])
        ]
        if left_out is not None:
            return self._plan_of(found[0], counts_DE, context)
        return self._cheapest(found, counts_DE, context, profile)

    def _cheapest(
        self,
        placements: list[ExpertPlacement],
        counts_DE: np.ndarray,
        context: LayerContext,
        profile: LayerProfile,
    ) -> LayerPlan:
        """The plan with the fewest modelled seconds, or the one without replicas if no plan has fewer.

        By Eq. 4, an expert with fewer replicas costs less, but a link between nodes carries it only once. The
        price with the measured links therefore selects.

        Args:
            placements: What the searches found.
            counts_DE: (token, k) pairs by source and expert, int64 ``[D, E]``.
            context: Data of the layer.
            profile: Measured costs.
        """
        traffic = OwnerTraffic(counts_DE, context.owner_E, context.topology)
        times = profile.num_micro_batches

        def seconds(plan: LayerPlan, dispatch: DispatchTraffic) -> float:
            return plan_seconds(plan, counts_DE, context, num_micro_batches=times, traffic=dispatch)

        plain = best = LayerPlan.owners_only(context)
        best_s = seconds(plain, traffic.without_replicas())
        for placement in placements:
            dispatch = traffic.of(placement)
            # With the same dispatch and no transfers, a plan takes at most as long as with its transfers.
            if not placement.num_replicas or seconds(plain, dispatch) >= best_s:
                continue
            plan = self._plan_of(placement, counts_DE, context)
            plan_s = seconds(plan, dispatch)
            if plan_s < best_s:
                best, best_s = plan, plan_s
        return best

    def _plan_of(self, placement: ExpertPlacement, counts_DE: np.ndarray, context: LayerContext) -> LayerPlan:
        transfer = two_level_transfer(placement, context.topology)
        is_split = self.settings.overlap and self.settings.split
        return LayerPlan(
            placement,
            transfer,
            gather_ahead=self.settings.overlap,
            dispatch_policy="owner",
            split=split_of(transfer, float(counts_DE.sum()), context) if is_split else WHOLE,
        )


def _model(profile: LayerProfile, topology: Topology, num_left_out: int, *, overlaps: bool) -> ProphetModel:
    cluster, link = profile.cluster, profile.slowest_link(topology)
    # The devices of a node share its link to other nodes, and a transfer of one expert crosses it once.
    num_sharing = topology.num_devices // topology.num_nodes if link is cluster.inter else 1
    return ProphetModel(
        num_devices=topology.num_devices,
        num_left_out=num_left_out,
        input_bytes=profile.token_bytes,
        expert_bytes=profile.expert_bytes,
        gradient_bytes=profile.reduced_bytes,
        bytes_per_s=1 / link.beta_s_per_byte / num_sharing,
        inputs_per_s=cluster.expert_flops_per_s / profile.flops_per_token,
        non_expert_s=profile.non_moe_s,
        overlaps=overlaps,
        transfer_bytes_per_s=1 / link.beta_s_per_byte,
        start_s=link.alpha_s,
    )
