"""Corrects a layer's plan after the gate, when the exact counts of the iteration are known (ours).

Replicas come from a search or, where this would take longer than it saves, from ``quota``'s assignment.
Hecate's calibration (§4.2) only adds replicas to free slots. A correction also drops replicas, so that others
can use their slots: the runtime waits for the replicas on their way before it gathers others, so their memory
is free by then.

Shape letters: D devices, E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.balanced.quota_planner import quota_assignment
from megatron_fssdp.planning.balanced.replica_planner import LEAST_SAVING, LayerSearch, layer_search
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.transfer_split import WHOLE
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy
from megatron_fssdp.planning.native.kernel import kernel_form
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.fssdp.priced_dispatch import dispatched_seconds
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan

QUOTA_S, QUOTA_S_PER_PAIR = 4.5e-4, 5.5e-8
SEARCH_S, SEARCH_S_PER_PAIR = 1.5e-3, 2e-7
"""Host seconds of a correction by ``quota``'s assignment, and by the search.

The second numbers are for each pair of expert and device. Measured at (8, 8), (64, 32), (256, 64) and
(256, 128) experts and devices: 0.42, 0.66, 1.4 and 2.2 ms with the assignment, and 1.4, 1.9, 4.5 and 8.7 ms
with the search, half or more of it for prices (means of the medians under two kinds of loads that jump).
The device waits for a correction. All ranks use these numbers in place of measured ones, because they must
make equal plans.
"""

PLAIN_TIMES = 50
"""Factor of these seconds with plain kernels, which search 10 to 150 times as long."""


@dataclass(frozen=True)
class ExpectedSeconds:
    """What a plan was expected to cost under the forecast for which it was made.

    Attributes:
        planned_s: Modelled seconds of the layer under the plan.
        plain_s: Modelled seconds of the layer without replicas.
    """

    planned_s: float
    plain_s: float

    def least_s(self, plain_s: float) -> float:
        """Fewest seconds that a search for other loads would find.

        The promise came from a search. If the layer costs as much as the forecast promised, then a search
        finds nothing much better. Loads that cost less without replicas than the forecast's lower the
        promise in proportion.

        Args:
            plain_s: Seconds without replicas under the other loads.
        """
        return self.planned_s * min(1.0, plain_s / max(self.plain_s, 1e-12))


@dataclass(frozen=True, eq=False)
class Correction:
    """A plan after the gate.

    Attributes:
        plan: Corrected plan, or the plan before the gate itself.
        seconds: Modelled seconds of the layer in the iteration, with the host's time for the correction.
        has_searched: Whether other replicas were considered.
    """

    plan: LayerPlan
    seconds: float
    has_searched: bool


@dataclass(frozen=True, eq=False)
class ExactCounts:
    """The counts of a layer's iteration, and the placements that suit them.

    Attributes:
        context: Data of the layer; costs are measured.
        counts_DE: (token, k) pairs of the iteration by source and expert, int64 ``[D, E]``.
        num_micro_batches: Number of micro-batches in the iteration; each has an equal part of the counts.
        slots: Most replicas that a device may hold.
        quota_policy: How tokens are split under ``quota``'s assignment; ``None``: as before the gate.
    """

    context: LayerContext
    counts_DE: np.ndarray
    num_micro_batches: int
    slots: int
    quota_policy: DispatchPolicy | None = None
    _layers: dict[tuple[bool, bool, bool], LayerSearch] = field(default_factory=dict)
    _suited: list[ExpertPlacement] = field(default_factory=list)

    def corrected(self, planned: LayerPlan, expected: ExpectedSeconds | None) -> Correction:
        """The plan with the fewest modelled seconds from now on: ``planned``, or one with other replicas.

        The gather of ``planned`` is on its way in any case, and its reduction is not. Replicas that it lacks
        are gathered while the layer waits. There are two ways to find other replicas: ``quota``'s assignment,
        which is quick, and the search. The device waits for either. So nothing is done that cannot save more
        than its host time (:meth:`savable_s`), and the search must save that much beyond the assignment.

        Args:
            planned: Plan whose gather has started; without replicas, the layer is planned after the gate.
            expected: What the forecast promised for ``planned``; ``None`` if there was no forecast.
        """
        now_s = self.seconds(planned)
        savable_s = self.savable_s(planned, expected, now_s)
        savable_s -= 0.0 if planned.transfer.edges else self.least_gather_s
        too_little_s = LEAST_SAVING * now_s
        if savable_s <= max(self.quota_s, too_little_s):
            return Correction(planned, now_s, has_searched=False)
        quotas = self._with_replicas(planned, self._quota_placement)
        savable_s -= max(0.0, now_s - self.seconds(quotas, after_gate=True))
        if savable_s <= max(self.search_s, too_little_s):
            host_s = self.quota_s
            policy = self.quota_policy or planned.dispatch_policy
            plans = [planned, replace(quotas, dispatch_policy=policy)]
        else:
            host_s = self.search_s
            placements = self._candidates(planned.placement, self._suited_to(planned))
            plans = [planned, *(self._with_replicas(planned, placement) for placement in placements)]
        seconds = [
            dispatched_seconds(
                plan,
                self.counts_DE,
                self.context,
                num_micro_batches=self.num_micro_batches,
                planned=planned,
            )
            for plan in plans
        ]
        best = int(np.argmin(seconds))
        return Correction(plans[best], seconds[best] + host_s, has_searched=True)

    def savable_s(self, planned: LayerPlan, expected: ExpectedSeconds | None, now_s: float) -> float:
        """Modelled seconds that a correction can save at most, computed without other replicas.

        No plan is faster than experts on balanced devices without any traffic. With a forecast there is a
        closer bound, see :meth:`ExpectedSeconds.least_s`.

        Args:
            planned: Plan before the gate.
            expected: What the forecast promised; ``None`` if there was no forecast.
            now_s: Seconds of ``planned`` with the exact counts.
        """
        least_s = self.balanced_s
        if expected is not None:
            plain_s = self.plain_s if planned.transfer.edges else now_s
            least_s = max(least_s, expected.least_s(plain_s))
        return now_s - least_s

    def seconds(self, plan: LayerPlan, *, after_gate: bool = False) -> float:
        """Modelled seconds of a plan as the search counts them, without rounding to whole tokens.

        Args:
            plan: Plan to price.
            after_gate: Whether its gather starts after the gate.
        """
        layer = self.layer(rematerialize=plan.rematerialize, hides=plan.gather_ahead, after_gate=after_gate)
        return layer.seconds(plan.placement)

    @cached_property
    def plain_s(self) -> float:
        """Modelled seconds without replicas; they do not depend on how replicas are gathered."""
        layer = next(iter(self._layers.values()), None) or self.layer(rematerialize=False, hides=True)
        return layer.plain_s

    @cached_property
    def balanced_s(self) -> float:
        """Seconds of the experts if all devices computed equally many pairs."""
        profile = self._profile
        mean = float(self.counts_DE.sum()) / self.context.num_devices
        flops = (1 + BACKWARD_PER_FORWARD) * mean * profile.flops_per_token
        return flops / profile.cluster.expert_flops_per_s

    @property
    def least_gather_s(self) -> float:
        """Seconds to gather one expert over the fastest link."""
        cluster, num_bytes = self._profile.cluster, self._profile.expert_bytes
        return min(link.time_s(num_bytes) for link in (cluster.intra, cluster.inter))

    @property
    def quota_s(self) -> float:
        """Modelled host seconds of a correction by ``quota``'s assignment."""
        return self._host_s(QUOTA_S, QUOTA_S_PER_PAIR)

    @property
    def search_s(self) -> float:
        """Modelled host seconds of a correction by the search."""
        return self._host_s(SEARCH_S, SEARCH_S_PER_PAIR)

    def _host_s(self, least_s: float, s_per_pair: float) -> float:
        compiled_s = least_s + s_per_pair * self.context.num_experts * self.context.num_devices
        return compiled_s if kernel_form().is_compiled else PLAIN_TIMES * compiled_s

    def found(
        self, *, rematerialize: bool, hides: bool, after_gate: bool = False
    ) -> tuple[ExpertPlacement, float]:
        """The placement that the search finds for the counts, and its modelled seconds.

        Args:
            rematerialize: Whether replicas are gathered and reduced with every micro-batch.
            hides: Whether transfers run beside compute.
            after_gate: Whether gathers start after the gate.
        """
        layer = self.layer(rematerialize=rematerialize, hides=hides, after_gate=after_gate)
        return layer.best_placement(slots=self.slots, most_replicated=self.context.num_experts)

    def layer(self, *, rematerialize: bool, hides: bool, after_gate: bool = False) -> LayerSearch:
        """The layer as the search prices it, made once for each way to gather.

        Args:
            rematerialize: Whether replicas are gathered and reduced with every micro-batch.
            hides: Whether transfers run beside compute.
            after_gate: Whether gathers start after the gate.
        """
        key = (rematerialize, hides, after_gate)
        if key not in self._layers:
            self._layers[key] = layer_search(
                self.context.owner_E,
                self.counts_DE,
                self.context.topology,
                self._profile,
                rematerialize=rematerialize,
                hides=hides,
                after_gate=after_gate,
            )
        return self._layers[key]

    @property
    def _profile(self) -> LayerProfile:
        assert self.context.profile is not None
        return self.context.profile

    def _with_replicas(self, planned: LayerPlan, placement: ExpertPlacement) -> LayerPlan:
        """A plan with other replicas."""
        return replace(
            planned,
            placement=placement,
            transfer=two_level_transfer(placement, self.context.topology),
            split=WHOLE,  # The shares fit the planned transfer only.
        )

    @cached_property
    def _quota_placement(self) -> ExpertPlacement:
        """The replicas of ``quota``'s assignment, in which no device computes much more than others."""
        context, one_DE = self.context, self.counts_DE // self.num_micro_batches
        tokens_ED = quota_assignment(context.owner_E, one_DE, context.topology, slots=self.slots)
        return ExpertPlacement(context.owner_E, context.owners.present_ED | (tokens_ED > 0))

    def _suited_to(self, planned: LayerPlan) -> ExpertPlacement:
        """The placement that suits the counts if its gather starts now, found once for all plans."""
        if not self._suited:
            found, _ = self.found(
                rematerialize=planned.rematerialize, hides=planned.gather_ahead, after_gate=True
            )
            self._suited.append(found)
        return self._suited[0]

    def _candidates(self, planned: ExpertPlacement, suited: ExpertPlacement) -> Iterator[ExpertPlacement]:
        """Placements between the planned one and the suited one, and the one without replicas.

        Args:
            planned: Replicas on their way.
            suited: Replicas that suit the counts.
        """
        yield suited
        if not planned.num_replicas:
            return
        yield ExpertPlacement.owners_only(planned.owner_E, planned.num_devices)
        here_ED, wanted_ED = planned.present_ED, suited.present_ED
        yield ExpertPlacement(planned.owner_E, here_ED & wanted_ED)
        load_E = self.counts_DE.sum(axis=0)
        yield _filled(suited, here_ED & ~wanted_ED, load_E, self.slots)
        yield _filled(planned, wanted_ED & ~here_ED, load_E, self.slots)


def unplanned(plan: LayerPlan, context: LayerContext) -> LayerPlan:
    """The plan without replicas that leaves all slots to a plan after the gate.

    Args:
        plan: Plan whose other fields the result has.
        context: Data of the layer.
    """
    plain = LayerPlan.owners_only(context)
    return replace(plan, placement=plain.placement, transfer=plain.transfer, split=WHOLE)


def _filled(
    placement: ExpertPlacement, more_ED: np.ndarray, load_E: np.ndarray, slots: int
) -> ExpertPlacement:
    """A placement with as many further replicas as its free slots hold, the most loaded experts first.

    Args:
        placement: Placement to extend.
        more_ED: Where further replicas may be, bool ``[E, D]``.
        load_E: Load of every expert, ``[E]``.
        slots: Most replicas that a device may hold.
    """
    free_D = slots - placement.replicas_per_device_D
    order_E = np.argsort(-load_E, kind="stable")
    fits_ED = more_ED[order_E] & (np.cumsum(more_ED[order_E], axis=0) <= free_D)
    present_ED = placement.present_ED.copy()
    present_ED[order_E] |= fits_ED
    return ExpertPlacement(placement.owner_E, present_ED, slots=slots)
