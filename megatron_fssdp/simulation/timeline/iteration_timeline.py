"""Timeline of one iteration: its lanes, and which work waits for which.

* ``compute``: the kernels of a device. For experts, these are the kernels of the slowest device.
* ``all-to-all``: router counts, dispatch and combine. The model computes nothing at the same time.
* ``transfer``: spAG, spRS, re-gathering and re-sharding, one after the other.
* ``host``: what the host does between the counts and the dispatch, while the device waits.

The forward pass of a layer consists of compute before the gate, counts, dispatch, experts and combine. spAG
starts together with the compute before the gate, or after this compute if the plan says so. spAG ends
before the dispatch. The runtime waits for it later, before the experts, but the rows use the same links.

The backward pass is the reverse, with twice the compute. spRS starts after the backward of the dispatch and
must end together with the same layer's compute before the gate. Re-materialized replicas are gathered again
after the spRS of the layer above, and must arrive before the backward of the experts.

If transfers are split, a part of spAG runs at the same time as the experts of the layer before, and a part of
spRS at the same time as their backward pass.

If an all-to-all and a transfer run at the same time and both take longest on the same kind of link, each gets
half of the link until one of them ends. So the link is never idle.

All times are float64 arrays over iterations, ``[I]``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.link_seconds import LinkTimes
from megatron_fssdp.planning.cost.stepped_exchange import SteppedExchange
from megatron_fssdp.simulation.timeline.layer_parts import LayerSeconds

COMPUTE, ALL_TO_ALL, TRANSFER, HOST = "compute", "all-to-all", "transfer", "host"

PARTS = (
    "other compute",
    "experts",
    "all-to-all",
    "waiting for spAG",
    "waiting for spRS",
    "re-sharding",
    "gradient sync",
    "host",
)
"""Parts of an iteration's time. Their seconds add up to the whole iteration."""

OnSpan = Callable[[str, str, np.ndarray, np.ndarray], None]


@dataclass(eq=False)
class IterationTimeline:
    """Clocks of the lanes while the timeline of an iteration is built.

    Attributes:
        num_iterations: Number of iterations, I.
        on_span: Function that is called with the lane, name, begin and end of every span.
        now_s: End of all work that the next compute or all-to-all waits for, in seconds: ``[I]``.
        lane_s: Time when the transfer lane becomes free, in seconds: ``[I]``.
        parts_s: Seconds so far of each part in :data:`PARTS`: ``[I]`` each.
    """

    num_iterations: int
    on_span: OnSpan | None = None
    now_s: np.ndarray = field(init=False)
    lane_s: np.ndarray = field(init=False)
    parts_s: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.now_s, self.lane_s = np.zeros((2, self.num_iterations))
        self.parts_s = {part: np.zeros(self.num_iterations) for part in PARTS}
        self._early_s = np.zeros(self.num_iterations)
        self._is_regathering = np.zeros(self.num_iterations, bool)
        self._regather_is_far = np.zeros(self.num_iterations, bool)

    def forward(
        self, name: str, layer: LayerSeconds, is_first: bool, above: LayerSeconds | None = None
    ) -> None:
        """Add one layer's forward pass.

        Args:
            name: Name of the layer.
            layer: Seconds of the layer's parts.
            is_first: Whether this is the first micro-batch of an iteration. Without re-materialization,
                weights are gathered only in this micro-batch.
            above: Seconds of the next MoE layer, or None for the last layer.
        """
        self._run("other compute", f"before {name}", layer.before_layer_s)
        again_s = np.where(layer.is_rematerialized, layer.regather.seconds, 0.0)
        gather_s = (1 - layer.gather_early) * layer.gather.seconds if is_first else again_s
        start_s = self.now_s
        early_s, self._early_s = self._early_s, np.zeros(self.num_iterations)
        arrival_s = self._transfer(f"spAG {name}", start_s, np.where(layer.is_ahead, gather_s, 0.0))
        arrival_s = np.maximum(arrival_s, early_s)
        self._run("other compute", f"attention, gate {name}", layer.before_gate_s)
        self._run("all-to-all", f"counts {name}", layer.counts_s, ALL_TO_ALL)
        self._run("host", f"plan {name}", layer.host_s + is_first * layer.host_first_s, HOST)
        late_s = np.where(layer.is_ahead, 0.0, gather_s)
        late_s = late_s + (is_first | layer.is_each_pass) * layer.addition_s
        arrival_s = np.maximum(arrival_s, self._transfer(f"spAG {name}", self.now_s, late_s))
        if layer.steps is not None:
            self._run_in_steps(
                name, layer.steps, layer, layer.dispatch, layer.combine, layer.experts_s, arrival_s
            )
        at_once = np.logical_not(layer.in_steps)
        self._wait("waiting for spAG", np.where(at_once, arrival_s, 0.0))
        self._run("all-to-all", f"dispatch {name}", at_once * layer.dispatch.seconds, ALL_TO_ALL)
        if above is not None and is_first:
            early_s = above.gather_early * above.gather.seconds
            self._early_s = self._transfer(f"spAG, first part, behind {name}", self.now_s, early_s)
        self._run("experts", f"experts {name}", at_once * layer.experts_s)
        self._run("all-to-all", f"combine {name}", at_once * layer.combine.seconds, ALL_TO_ALL)

    def backward(
        self,
        name: str,
        layer: LayerSeconds,
        below: LayerSeconds | None,
        is_last: bool,
        above: LayerSeconds | None = None,
    ) -> None:
        """Add one layer's backward pass.

        Args:
            name: Name of the layer.
            layer: Seconds of the layer's parts.
            below: Seconds of the MoE layer before it, whose backward comes next, or None for the first layer.
            is_last: Whether this is the last micro-batch of an iteration. Without re-materialization,
                gradients are sent to the owners only in this micro-batch.
            above: Seconds of the MoE layer after it, whose backward came before, or None for the last layer.
        """
        starts = layer.is_rematerialized & ~self._is_regathering
        self._transfer(f"spAG again {name}", self.now_s, np.where(starts, layer.regather.seconds, 0.0))
        self._regather_is_far = np.where(starts, layer.regather.is_far, self._regather_is_far)
        needed_s = np.where(layer.is_rematerialized, self.lane_s, 0.0)
        experts_s = BACKWARD_PER_FORWARD * layer.experts_s
        rest_s = np.zeros(self.num_iterations)
        if layer.steps is not None:
            back = (layer.combine, layer.dispatch, experts_s, needed_s)
            self._run_in_steps(f"{name}, backward", layer.steps, layer, *back)
        at_once = np.logical_not(layer.in_steps)
        self._contended_all_to_all(f"combine' {name}", layer, at_once)
        self._wait("waiting for spAG", np.where(at_once & layer.is_rematerialized, self.lane_s, 0.0))
        if above is not None and is_last:
            rest_s = self._transfer(
                f"spRS, last part, behind {name}", self.now_s, above.reduce_late * above.reduce_s
            )
        self._run("experts", f"experts' {name}", at_once * experts_s)
        self._run("all-to-all", f"dispatch' {name}", at_once * layer.dispatch.seconds, ALL_TO_ALL)
        sends_home = layer.is_rematerialized | layer.is_each_pass | is_last
        reduce_s = np.where(sends_home, (1 - layer.reduce_late) * layer.reduce_s, 0.0)
        home_s = np.maximum(rest_s, self._transfer(f"spRS {name}", self.now_s, reduce_s))
        self._wait("waiting for spRS", np.where(layer.is_ahead, 0.0, home_s))
        self._is_regathering = np.zeros(self.num_iterations, bool)
        if below is not None:
            self._is_regathering = below.is_rematerialized & below.is_ahead & layer.is_ahead
            again_s = np.where(self._is_regathering, below.regather.seconds, 0.0)
            self._transfer(f"spAG again, below {name}", self.now_s, again_s)
            self._regather_is_far = below.regather.is_far
        self._run("other compute", f"attention, gate' {name}", BACKWARD_PER_FORWARD * layer.before_gate_s)
        self._wait("waiting for spRS", home_s)
        self._run("other compute", f"before' {name}", BACKWARD_PER_FORWARD * layer.before_layer_s)

    def compute(self, name: str, seconds: float) -> None:
        """Add compute that does not belong to an MoE layer."""
        self._run("other compute", name, seconds)

    def reshard(self, seconds: np.ndarray) -> None:
        """Add the re-shard before an iteration. Everything else waits for it."""
        end_s = self._transfer("re-sharding", self.now_s, seconds)
        self._wait("re-sharding", end_s)

    def sync_gradients(self, seconds: float) -> None:
        """Add the reduction of the dense gradients after the last backward pass."""
        self._run("gradient sync", "gradient sync", seconds, ALL_TO_ALL)

    def wait_for_host(self, seconds: np.ndarray) -> None:
        """End the iteration no earlier than the host, which works for ``seconds`` in it, ``[I]``."""
        self._wait("host", seconds)

    def skip(self, parts_s: dict[str, np.ndarray], times: int) -> None:
        """Add ``times`` more passes that take as long as a pass that was already added.

        Args:
            parts_s: Seconds of each part of that pass, ``[I]``.
            times: Number of passes to add.
        """
        for part, seconds in parts_s.items():
            self.parts_s[part] = self.parts_s[part] + times * seconds
            self.now_s = self.now_s + times * seconds
        self.lane_s = np.maximum(self.lane_s, self.now_s)

    def _run(self, part: str, name: str, seconds: float | np.ndarray, lane: str = COMPUTE) -> None:
        begin_s, self.now_s = self.now_s, self.now_s + seconds
        self.parts_s[part] = self.parts_s[part] + seconds
        self._tell(lane, name, begin_s, self.now_s)

    def _wait(self, part: str, until_s: np.ndarray) -> None:
        waited_s = np.maximum(until_s - self.now_s, 0.0)
        self.parts_s[part] = self.parts_s[part] + waited_s
        self.now_s = self.now_s + waited_s

    def _run_in_steps(
        self,
        name: str,
        steps: SteppedExchange,
        layer: LayerSeconds,
        first: LinkTimes,
        second: LinkTimes,
        experts_s: np.ndarray,
        needed_s: np.ndarray,
    ) -> None:
        """Add both exchanges and the experts, in the iterations in which the layer runs in steps.

        The first step of the experts waits for replicas until ``needed_s``.
        """
        first_rows_s = self.now_s + layer.in_steps * steps.step_s(first, 0)
        late_s = layer.in_steps * np.maximum(needed_s - first_rows_s, 0.0)
        self._wait("waiting for spAG", self.now_s + late_s)
        begin_s, together_s = self.now_s, layer.in_steps * steps.seconds(first, second, experts_s)
        experts_s = layer.in_steps * experts_s
        self.now_s = begin_s + together_s
        self.parts_s["experts"] = self.parts_s["experts"] + experts_s
        self.parts_s["all-to-all"] = self.parts_s["all-to-all"] + together_s - experts_s
        self._tell(ALL_TO_ALL, f"exchange in steps {name}", begin_s, self.now_s)
        self._tell(COMPUTE, f"experts {name}", first_rows_s, first_rows_s + experts_s)

    def _transfer(self, name: str, ready_s: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Run a transfer on the transfer lane and return its end in seconds, or 0 where it takes no time."""
        runs = seconds > 0
        begin_s = np.maximum(ready_s, self.lane_s)
        end_s = begin_s + seconds
        self.lane_s = np.where(runs, end_s, self.lane_s)
        self._tell(TRANSFER, name, np.where(runs, begin_s, ready_s), np.where(runs, end_s, ready_s))
        return np.where(runs, end_s, 0.0)

    def _contended_all_to_all(self, name: str, layer: LayerSeconds, at_once: np.ndarray) -> None:
        """Add the backward of combine, which can share a link with a re-gathering that still runs.

        Iterations in which the layer runs in steps (not ``at_once``) get nothing.
        """
        seconds = at_once * layer.combine.seconds
        left_s = np.maximum(self.lane_s - self.now_s, 0.0)
        contends = (left_s > 0) & layer.is_rematerialized & (self._regather_is_far == layer.combine.is_far)
        shorter_s = np.where(contends, np.minimum(seconds, left_s), 0.0)
        before_s = self.lane_s
        # Both run at half speed until the shorter one ends. The other one is delayed by the same time.
        self.lane_s = np.where(contends, self.lane_s + shorter_s, self.lane_s)
        self._tell(TRANSFER, "shared link", before_s, self.lane_s)
        self._run("all-to-all", name, seconds + shorter_s, ALL_TO_ALL)

    def _tell(self, lane: str, name: str, begin_s: np.ndarray, end_s: np.ndarray) -> None:
        if self.on_span is not None:
            self.on_span(lane, name, begin_s, end_s)
