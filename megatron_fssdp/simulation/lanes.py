"""The lanes of a device in one iteration, and which work waits for which.

* ``compute``: the kernels of a device. For experts, these are the kernels of the slowest device.
* ``all-to-all``: router counts, dispatch and combine. The model computes nothing at the same time.
* ``transfer``: spAG, spRS, re-gathering and re-sharding, one after the other.
* ``host``: shared plans before the first pass, and what the host does between the counts and the dispatch.

spAG starts together with the compute before the gate, or after this compute if the plan says so. It ends
before the dispatch. The runtime waits for it later, before the experts, but the rows use the same links.

The backward pass is the reverse, with twice the compute. spRS starts after the backward of the dispatch and
must end together with the same layer's compute before the gate. Re-materialized replicas are gathered again
after the spRS of the layer above, and must arrive before the backward of the experts.

If weights are split, a part of spAG runs at the same time as the experts of the layer before.

A recomputed layer runs its forward pass a second time, with its exchanges, before its backward pass.

Stages of a pipeline are idle while the first micro-batch arrives and the last one leaves: the seconds of the
micro-batches times (stages - 1) / (micro-batches · model chunks of a stage), as under 1F1B, and interleaved
(Narayanan et al. 2021, §2.2). Between passes they wait for messages (``dense_messages.py``).

If an all-to-all and a transfer run at the same time and both take longest on the same kind of link, each gets
half of the link until one of them ends. So the link is never idle.
"""

from collections.abc import Callable

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.simulation.layer_record import IterationRecord, LayerRecord

COMPUTE, ALL_TO_ALL, TRANSFER, HOST = "compute", "all-to-all", "transfer", "host"

PARTS = (
    "other compute",
    "experts",
    "all-to-all",
    "waiting for spAG",
    "waiting for spRS",
    "re-sharding",
    "dense messages",
    "gradient sync",
    "host",
    "pipeline bubble",
)
"""Parts of an iteration's time. Their seconds add up to the whole iteration."""

_LANES = {"all-to-all": ALL_TO_ALL, "dense messages": ALL_TO_ALL, "gradient sync": ALL_TO_ALL, "host": HOST}
"""Lanes of the parts that are not compute."""

OnSpan = Callable[[str, str, float, float], None]


class Lanes:
    """Clocks of the lanes while an iteration's work is laid out; ``on_span`` gets lane, name, begin and end.

    Attributes:
        now_s: End of all work that the next compute or all-to-all waits for, in seconds.
        parts_s: Seconds so far of each part in :data:`PARTS`.
    """

    def __init__(self, on_span: OnSpan | None = None) -> None:
        self._on_span = on_span
        self.now_s = self._lane_s = 0.0  # the latter: when the transfer lane becomes free
        self.parts_s = dict.fromkeys(PARTS, 0.0)
        self._early_s = 0.0
        self._regathers = self._regather_is_far = False

    def run_iteration(self, record: IterationRecord) -> "Lanes":
        """Add a whole iteration; return these lanes."""
        # Everything else waits for a re-shard.
        self._wait("re-sharding", self._transfer("re-sharding", 0.0, record.moving_s))
        self._run("host", "plans", record.plans_s)
        num, done = record.num_micro_batches, 0
        alike, begin_s = num // len(record.micro_batches), self.now_s
        while done < num:
            before_s, layers = dict(self.parts_s), record.micro_batches[done // alike]
            self._run_micro_batch(layers, record, is_first=done == 0, is_last=done == num - 1)
            done += 1
            if self._on_span is None and done == 2 and alike == num > 3:
                # All micro-batches between the first and the last take the same time.
                for part, seconds in self.parts_s.items():
                    more_s = (num - 3) * (seconds - before_s[part])
                    self.parts_s[part] += more_s
                    self.now_s += more_s
                self._lane_s = max(self._lane_s, self.now_s)
                done = num - 1
        messages_s = num * record.stage_messages_s
        idle_s = record.bubble * (self.now_s - begin_s + messages_s)
        idle_s += 0.0 if record.hides_stage_messages else messages_s
        self._wait("pipeline bubble", self.now_s + idle_s)
        self._run("gradient sync", "gradient sync", record.gradient_sync_s)
        self._wait("host", sum(layer.host_s for layers in record.micro_batches for layer in layers))
        return self

    def _run_micro_batch(
        self, layers: list[LayerRecord], record: IterationRecord, *, is_first: bool, is_last: bool
    ) -> None:
        """Add both passes of one micro-batch.

        Unless replicas live for less, their weights are gathered only in the first micro-batch of an
        iteration, and their gradients are sent to the owners only in the last one.
        """
        around = (None, *layers, None)
        numbered = list(enumerate(layers, start=1))
        for number, layer in numbered:
            self._forward(f"layer {number}", layer, is_first, above=around[number + 1])
        behind_s, messages = record.behind_s, record.behind_messages
        self._run("other compute", "behind the layers", behind_s)
        self._run("dense messages", "behind the layers", sum(messages))
        backward_s = BACKWARD_PER_FORWARD * behind_s + record.behind_again_s
        self._run("other compute", "behind the layers'", backward_s)
        for number, layer in reversed(numbered):
            self._backward(f"layer {number}", layer, is_last, below=around[number - 1])

    def _forward(self, name: str, layer: LayerRecord, is_first: bool, above: LayerRecord | None) -> None:
        """Add the forward pass of a layer."""
        self._run("other compute", f"before {name}", layer.before_layer_s)
        self._run("dense messages", f"before {name}", layer.before_messages.forward_s)
        gather_s = 0.0
        if is_first:
            gather_s = (1 - layer.early) * layer.gather_s
        elif layer.life is ReplicaLife.LAYER_PASS:
            gather_s = layer.regather.seconds
        arrival_s, self._early_s = self._early_s, 0.0
        if layer.ahead:
            arrival_s, gather_s = max(arrival_s, self._transfer(f"spAG {name}", self.now_s, gather_s)), 0.0
        if is_first or layer.life is ReplicaLife.MICRO_BATCH:
            gather_s += layer.addition_s
        plan_s = layer.plan_s + is_first * layer.first_plan_s
        self._layer_forward(name, layer, plan_s, gather_s, arrival_s, above if is_first else None)

    def _layer_forward(
        self,
        name: str,
        layer: LayerRecord,
        plan_s: float,
        gather_s: float,
        arrival_s: float,
        above: LayerRecord | None = None,
    ) -> None:
        """Add a pass of the transformer layer, which gathers for ``gather_s`` once it is planned.

        Replicas for which it has no need to gather arrive at ``arrival_s``. A part of those of the layer
        ``above``, if it is given, travels beside the experts.
        """
        self._run("other compute", f"attention, gate {name}", layer.before_gate_s)
        self._run("dense messages", f"attention {name}", layer.gate_messages.forward_s)
        self._run("all-to-all", f"counts {name}", layer.counts_s)
        self._run("host", f"plan {name}", plan_s)
        arrival_s = max(arrival_s, self._transfer(f"spAG {name}", self.now_s, gather_s))
        if layer.steps is not None:
            self._run_in_steps(name, layer, arrival_s)
            return
        self._wait("waiting for spAG", arrival_s)
        self._run("all-to-all", f"dispatch {name}", layer.dispatch.seconds)
        if above is not None:
            early_s = above.early * above.gather_s
            self._early_s = self._transfer(f"spAG, first part, behind {name}", self.now_s, early_s)
        self._run("experts", f"experts {name}", layer.experts_s)
        self._run("all-to-all", f"combine {name}", layer.combine.seconds)

    def _backward(self, name: str, layer: LayerRecord, is_last: bool, below: LayerRecord | None) -> None:
        """Add the backward pass of a layer."""
        again = layer.life is ReplicaLife.LAYER_PASS
        if again and not self._regathers:
            self._regather(f"spAG again {name}", layer)
        if layer.recomputed:
            # A checkpointed pass keeps no replicas, so those of a micro-batch are planned and gathered anew.
            gather_s = layer.addition_s if layer.life is ReplicaLife.MICRO_BATCH else 0.0
            arrival_s = self._lane_s if again else 0.0
            self._layer_forward(f"{name}, again", layer, layer.plan_s, gather_s, arrival_s)
        if layer.steps is not None:
            self._run_in_steps(f"{name}, backward", layer, self._lane_s if again else 0.0, backward=True)
        else:
            self._contended_all_to_all(f"combine' {name}", layer, again)
            if again:
                self._wait("waiting for spAG", self._lane_s)
            self._run("experts", f"experts' {name}", BACKWARD_PER_FORWARD * layer.experts_s)
            self._run("all-to-all", f"dispatch' {name}", layer.dispatch.seconds)
        sends_home = is_last or layer.life in (ReplicaLife.LAYER_PASS, ReplicaLife.MICRO_BATCH)
        home_s = self._transfer(f"spRS {name}", self.now_s, layer.reduce_s if sends_home else 0.0)
        if not layer.ahead:
            self._wait("waiting for spRS", home_s)
        self._regathers = False
        if below is not None and below.life is ReplicaLife.LAYER_PASS and below.ahead and layer.ahead:
            self._regathers = True
            self._regather(f"spAG again, below {name}", below)
        self._run("other compute", f"attention, gate' {name}", BACKWARD_PER_FORWARD * layer.before_gate_s)
        self._run("dense messages", f"attention' {name}", layer.gate_messages.backward_s)
        self._wait("waiting for spRS", home_s)
        before_s = BACKWARD_PER_FORWARD * layer.before_layer_s + layer.before_again_s
        self._run("other compute", f"before' {name}", before_s)
        self._run("dense messages", f"before' {name}", layer.before_messages.backward_s)

    def _run(self, part: str, name: str, seconds: float) -> None:
        begin_s, self.now_s = self.now_s, self.now_s + seconds
        self.parts_s[part] += seconds
        self._tell(_LANES.get(part, COMPUTE), name, begin_s, self.now_s)

    def _wait(self, part: str, until_s: float) -> None:
        if until_s > self.now_s:
            self.parts_s[part] += until_s - self.now_s
            self.now_s = until_s

    def _run_in_steps(
        self, name: str, layer: LayerRecord, needed_s: float, *, backward: bool = False
    ) -> None:
        """Add both exchanges and the experts in steps; the experts wait for replicas until ``needed_s``."""
        assert layer.steps is not None
        first_step_s = layer.steps.step_s(layer.combine if backward else layer.dispatch, 0)
        experts_s = layer.experts_s * (BACKWARD_PER_FORWARD if backward else 1)
        self._wait("waiting for spAG", needed_s - first_step_s)
        begin_s, self.now_s = self.now_s, self.now_s + layer.together_s(backward=backward)
        self.parts_s["experts"] += experts_s
        self.parts_s["all-to-all"] += self.now_s - begin_s - experts_s
        self._tell(ALL_TO_ALL, f"exchange in steps {name}", begin_s, self.now_s)
        self._tell(COMPUTE, f"experts {name}", begin_s + first_step_s, begin_s + first_step_s + experts_s)

    def _transfer(self, name: str, ready_s: float, seconds: float) -> float:
        """Run a transfer on the transfer lane and return its end in seconds, or 0 if it takes no time."""
        if seconds <= 0:
            return 0.0
        begin_s = max(ready_s, self._lane_s)
        self._lane_s = begin_s + seconds
        self._tell(TRANSFER, name, begin_s, self._lane_s)
        return self._lane_s

    def _regather(self, name: str, layer: LayerRecord) -> None:
        self._transfer(name, self.now_s, layer.regather.seconds)
        self._regather_is_far = layer.regather.is_far

    def _contended_all_to_all(self, name: str, layer: LayerRecord, again: bool) -> None:
        """Add the backward of combine, which can share a link with a re-gathering that still runs."""
        seconds, left_s = layer.combine.seconds, self._lane_s - self.now_s
        if again and left_s > 0 and self._regather_is_far == layer.combine.is_far:
            # Both run at half speed until the shorter one ends. The other one is delayed by the same time.
            shorter_s = min(seconds, left_s)
            self._tell(TRANSFER, "shared link", self._lane_s, self._lane_s + shorter_s)
            self._lane_s += shorter_s
            seconds += shorter_s
        self._run("all-to-all", name, seconds)

    def _tell(self, lane: str, name: str, begin_s: float, end_s: float) -> None:
        if self._on_span is not None and end_s > begin_s:
            self._on_span(lane, name, begin_s, end_s)
