"""Pro-Prophet: the most loaded experts on a subset of the devices, planned ahead (Pro-Prophet, §IV).

Shape letters: D devices, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_fssdp.planning.arrays import checked_counts, doubling
from megatron_fssdp.planning.compiled_form import kernel
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD, NUM_ALL_TO_ALLS
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import early_share, fastest
from megatron_fssdp.strategies.prophet import ProphetSettings
from megatron_fssdp.strategies.strategy import MeasuredReplicas

ROUNDING = 1e-9
"""More than the relative rounding error of modelled seconds."""


@dataclass(frozen=True)
class ProphetModel:
    """Pro-Prophet's performance model of one MoE layer (§IV-B, Eq. 1 to 6; §V-C, Eq. 8).

    The methods take numbers or arrays of equal shapes, with one entry for each case.

    Attributes:
        input_bytes: Bytes of one input (one token's hidden state), ``size(input)``.
        bytes_per_s: Mean bandwidth of a device while all devices exchange inputs, ``B̄``.
        inputs_per_s: Inputs for which a device computes the expert's forward pass in a second, ``t``.
        non_expert_s: Seconds of the forward pass of the computation between two MoE layers, ``FNEC``.
        overlaps: Whether Trans and Agg run beside computation. Then Eq. 8 is used in place of Eq. 6.
        transfer_bytes_per_s: Bandwidth of Trans and Agg; ``None`` means ``B̄``, as in the paper. This field
            is ours, because a two-level transfer has a node's link for itself.
        start_s: Start-up seconds of each expert's Trans, and of its Agg. The paper has none.
    """

    num_devices: int
    input_bytes: float
    expert_bytes: float
    gradient_bytes: float
    bytes_per_s: float
    inputs_per_s: float
    non_expert_s: float = 0.0
    overlaps: bool = False
    transfer_bytes_per_s: float | None = None
    start_s: float = 0.0

    def all_to_all_s(self, most_received: Any) -> Any:
        """Seconds of one all-to-all, ``T_A2A = max_i R_i · size(input) / B̄`` (Eq. 1)."""
        return most_received * self.input_bytes / self.bytes_per_s

    def expert_s(self, most_computed: Any) -> Any:
        """Seconds of the experts' forward pass, ``T_FEC = max_i H_i / t`` (Eq. 2), and half of Eq. 3."""
        return most_computed / self.inputs_per_s

    def transfer_s(self, num_selected: Any, num_bytes: float, num_left_out: int) -> Any:
        """Seconds of ``T_Trans = s · (D − n) · size / (D · B̄)`` (Eq. 4), or of ``T_Agg`` (Eq. 5).

        ``s`` experts are selected, and each is sent to all but ``n`` devices.
        """
        share = (self.num_devices - num_left_out) / self.num_devices
        bytes_per_s = self.transfer_bytes_per_s or self.bytes_per_s
        return num_selected * (self.start_s + share * num_bytes / bytes_per_s)

    def layer_s(self, most_received: Any, most_computed: Any, num_selected: Any, num_left_out: int) -> Any:
        """Modelled seconds of the layer: Eq. 6, or Eq. 8 if transfers overlap computation."""
        forward_s = self.expert_s(most_computed)
        trans_s = self.transfer_s(num_selected, self.expert_bytes, num_left_out)
        agg_s = self.transfer_s(num_selected, self.gradient_bytes, num_left_out)
        if self.overlaps:
            trans_s = np.maximum(0.0, trans_s - (forward_s + self.non_expert_s))
            agg_s = np.maximum(0.0, agg_s - BACKWARD_PER_FORWARD * (forward_s + self.non_expert_s))
        moved_s = NUM_ALL_TO_ALLS * self.all_to_all_s(most_received)
        return moved_s + (1 + BACKWARD_PER_FORWARD) * forward_s + trans_s + agg_s


def greedy_placements(
    owner_E: np.ndarray,
    counts_DE: np.ndarray,
    model: ProphetModel,
    left_out: Sequence[int],
    *,
    balance: float,
    slots: int,
) -> list[ExpertPlacement]:
    """Plan one layer by the greedy search, once for each number ``n`` of ``left_out`` (Pro-Prophet, Alg. 1).

    Each step takes the most loaded device, and of its experts the most loaded one that has not been selected
    yet. The expert is sent to all devices except the ``n`` devices that have the fewest inputs for it. Inputs
    on devices that have the expert then stay there; all others go to its owner. The steps end when the load
    is balanced: ``max(H) − min(H) < α · I / E`` (Eq. 7, ``α`` is ``balance``). The result is the sequence of
    first steps with the fewest modelled seconds, or no step if none lowers them.

    The (token, k) pairs ``[D, E]`` are those of an iteration, and a device has at most ``slots`` replicas.
    """
    num_experts, num_devices = len(owner_E), model.num_devices
    plain = ExpertPlacement.owners_only(owner_E, num_devices)
    owner = plain.owner_E
    counts = checked_counts(counts_DE, num_devices, num_experts)
    load_E, inputs_ED = counts.sum(axis=0), np.ascontiguousarray(counts.T)
    computed_D, own_D = (
        np.bincount(owner, weights=tokens_E, minlength=num_devices).astype(np.int64)
        for tokens_E in (load_E, counts[owner, np.arange(num_experts)])
    )
    plain_s = float(model.layer_s((computed_D - own_D).max(), computed_D.max(), 0, 0))
    fewest_first_ED = np.argsort(inputs_ED, axis=1, kind="stable")
    layer = tuple(memoryview(np.array(array)) for array in (owner, load_E, inputs_ED, fewest_first_ED))
    slots = min(slots, num_experts)
    placements = []
    for number in left_out:
        # More steps would take longer than no replicas even if they left no all-to-all and level loads.
        steps = np.arange(1, num_experts + 1)
        least_s = model.layer_s(0.0, load_E.sum() / num_devices, steps, number)
        most_steps = int((least_s * (1 - ROUNDING) < plain_s).sum()) if slots > 0 else 0
        after = np.zeros((most_steps, 3), np.int64)
        replicas = np.zeros((max(min(slots * num_devices, most_steps * (num_devices - 1)), 1), 2), np.int64)
        changed = (computed_D.copy(), computed_D - own_D, np.full(num_devices, slots), np.zeros_like(owner))
        num_steps = kernel("greedy_planners").greedy_steps(
            *layer,
            *(memoryview(array) for array in (*changed, replicas, after)),
            tolerance=balance * int(load_E.sum()) / num_experts,
            num_left_out=number,
        )
        after = after[:num_steps]
        step_s = model.layer_s(after[:, 1], after[:, 2], steps[: len(after)], number)
        placements.append(plain)
        if len(after) and step_s.min() < plain_s:
            expert_P, device_P = replicas[: after[step_s.argmin(), 0]].T
            present_ED = plain.present_ED.copy()
            present_ED[expert_P, device_P] = True
            placements[-1] = ExpertPlacement(owner, present_ED)
    return placements


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
        return self._plans.of(context.layer, (context,), counts_DE, lambda: self._planned(context, counts_DE))

    def _planned(self, context: LayerContext, counts_DE: np.ndarray) -> LayerPlan:
        most, left_out = context.num_devices - 1, self.settings.left_out
        cases = [0, *doubling(most)] if left_out is None else [min(left_out, most)]
        placements = greedy_placements(
            *(context.owner_E, counts_DE, self._model(context), cases),
            balance=PROPHET_BALANCE,
            slots=self.slots(context),
        )
        plans = [self._plan_of(placement, counts_DE, context) for placement in placements]
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
