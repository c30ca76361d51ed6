"""Corrects a layer's plan after the gate, when the exact counts of the iteration are known (ours).

Hecate's calibration (§4.2) only adds replicas to free slots. A correction also drops replicas, so that others
can use their slots: the runtime waits for the replicas on their way before it gathers others, so their memory
is free by then.

Shape letters: D devices, E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.balanced.replica_planner import LEAST_SAVING, LayerSearch, layer_search
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.transfer_split import WHOLE
from megatron_fssdp.planning.dispatch.token_dispatch import DispatchPolicy
from megatron_fssdp.planning.native.kernel import kernel_form
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.fssdp.priced_dispatch import dispatched_seconds, fastest_dispatch
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan

COMPILED_SEARCH_S, PLAIN_SEARCH_S = 45e-6, 1e-3
"""Seconds of a correction for each expert and each device, with compiled and with plain kernels.

Measured at (16, 8), (64, 32) and (256, 64) experts and devices: 1.7, 4.1 and 11.5 ms compiled, with a search
that was slower than the present one. Half or more of it are the prices of the candidates. Plain kernels
search 10 to 150 times as long (``benchmarks/host/planner_host_cost.py``). The device waits for a correction.
All ranks use this number in place of a measured one, because they must make equal plans.
"""


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
        seconds: Modelled seconds of the layer in the iteration, with the host's time for the search.
        has_searched: Whether other replicas were searched.
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
        policies: How tokens may be split under a corrected plan; empty: as under the plan before the gate.
    """

    context: LayerContext
    counts_DE: np.ndarray
    num_micro_batches: int
    slots: int
    policies: tuple[DispatchPolicy, ...] = ()
    _layers: dict[tuple[bool, bool, bool], LayerSearch] = field(default_factory=dict)
    _suited: list[ExpertPlacement] = field(default_factory=list)

    def corrected(self, planned: LayerPlan, expected: ExpectedSeconds | None) -> Correction:
        """The plan with the fewest modelled seconds from now on: ``planned``, or one with other replicas.

        The gather of ``planned`` is on its way in any case, and its reduction is not. Replicas that it lacks
        are gathered while the layer waits. The search takes host time for which the device waits, so it runs
        only if it can save more than this time, see :meth:`savable_s`.

        Args:
            planned: Plan whose gather has started; without replicas, the layer is planned after the gate.
            expected: What the forecast promised for ``planned``; ``None`` if there was no forecast.
        """
        now_s = self.seconds(planned)
        least_s = self.search_s + (0.0 if planned.transfer.edges else self.least_gather_s)
        if self.savable_s(planned, expected, now_s) <= max(least_s, LEAST_SAVING * now_s):
            return Correction(planned, now_s, has_searched=False)
        plan, seconds = planned, self._exact_s(planned, planned)
        for placement in self._candidates(planned.placement, self._suited_to(planned)):
            candidate = replace(
                planned,
                placement=placement,
                transfer=two_level_transfer(placement, self.context.topology),
                split=WHOLE,  # The shares fit the planned transfer only.
            )
            candidate_s = self._exact_s(candidate, planned)
            if candidate_s < seconds:
                plan, seconds = candidate, candidate_s
        if self.policies:
            plan, seconds = fastest_dispatch(
                plan,
                self.policies,
                self.counts_DE,
                self.context,
                num_micro_batches=self.num_micro_batches,
                planned=planned,
            )
        return Correction(plan, seconds + self.search_s, has_searched=True)

    def savable_s(self, planned: LayerPlan, expected: ExpectedSeconds | None, now_s: float) -> float:
        """Modelled seconds that a correction can save at most, computed without a search.

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
    def search_s(self) -> float:
        """Modelled host seconds of a correction: the search and the prices of its candidates."""
        per_size_s = COMPILED_SEARCH_S if kernel_form().is_compiled else PLAIN_SEARCH_S
        return per_size_s * (self.context.num_experts + self.context.num_devices)

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

    def _exact_s(self, plan: LayerPlan, planned: LayerPlan) -> float:
        return dispatched_seconds(
            plan, self.counts_DE, self.context, num_micro_batches=self.num_micro_batches, planned=planned
        )

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
