"""The iterations of one MoE layer: the pass in use, gradients on their way, counts, loads and times.

Shape letters: T tokens, E experts.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_fssdp.runtime.clocks.layer_stopwatch import LayerStopwatch
from megatron_fssdp.runtime.clocks.pass_timer import Part
from megatron_fssdp.runtime.layers.home_gradients import HomeGradients
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.runtime.layers.planned_layer import PlannedLayer
from megatron_fssdp.runtime.layers.slot_counts import SlotCounts
from megatron_fssdp.runtime.layers.slot_pass import SlotPass
from megatron_fssdp.runtime.slots.autograd_points import in_backward
from megatron_fssdp.runtime.slots.replica_transfers import ReplicaTransfers
from megatron_fssdp.strategies.auto import AutoStrategy
from megatron_fssdp.strategies.layer_plan import LayerPlan


class IteratedLayer(PlannedLayer):
    """A layer from begin to end of iterations. Further arguments are those of :class:`PlannedLayer`.

    Args:
        measures_spread: Whether the ranks count on how many nodes and devices the experts of a token are;
            equal on all ranks.

    Attributes:
        load: Loads, bytes and times of the running iteration.
        counts: Counts of the running iteration on the device.
        stopwatch: Stopwatch of the layer; ``None`` while the layer is not measured.
        on_pass: Function that is called with the pass in use whenever another one comes into use. The caller
            binds its dispatcher and its experts to the slots.
        gradients: Gradients of the running iteration. If the caller's experts compute weight gradients apart
            from their backward pass, it sets ``delays_weight_gradients`` and marks them as computed.
    """

    def __init__(self, *planned: Any, measures_spread: bool = False, **options: Any) -> None:
        super().__init__(*planned, **options)
        context = self.context
        self.load = LayerLoad.empty(context)
        self.counts = SlotCounts(context.topology, context.owner_E, measures_spread)
        self.stopwatch: LayerStopwatch | None = None
        self.on_pass: Callable[[SlotPass], object] = lambda one: None
        self.gradients = HomeGradients(self)
        self._current: SlotPass | None = None
        self._is_counted = self._is_final = self._asks_after_gate = False
        self._is_alone = context.num_devices == 1

    @property
    def is_home(self) -> bool:
        """Whether no gradient of a replica is missing at its owner."""
        return self.gradients.is_home

    def renumber(self, layer: int) -> None:
        """Set the layer number, which the model assigns after it has built its layers."""
        self.context = replace(self.context, layer=layer)
        self.experts = replace(self.experts, what=f"layer {layer}")
        self.load.layer = layer

    def mark(self, tensor: torch.Tensor, forward: Part | None, backward: Part | None) -> None:
        """Mark a border between two parts of the layer, if they are measured (:meth:`PassTimer.border`)."""
        if self.timer.is_running:
            self.timer.border((self.load.forward, self.load.backward), tensor, forward, backward)

    # The pass in use.

    def plan_iteration(self) -> LayerPlan:
        """Make the plan of the running iteration from the loads of earlier iterations, if it does not exist.

        It does not change until the iteration ends, except for one correction with the first micro-batch by
        strategies that ask for it. Every micro-batch and a recomputed forward pass use the same slots.
        """
        if self.shared is None:
            self.shared = self._make(self._next_plan())
            self._asks_after_gate = self.strategy.asks_after_gate(self.context.layer)
            self._use(self.shared)
        return self.shared.plan

    def _pass_for(self, routing_map: torch.Tensor | None) -> SlotPass:
        """The pass of the iteration, or a new one for the micro-batch with this routing map."""
        is_planned = self._is_alone or self.clock.driven
        plan = self.plan_iteration() if is_planned else self._next_plan()
        if is_planned and (not plan.each_micro_batch or routing_map is None or self._is_alone):
            if routing_map is not None and self._asks_after_gate and not self._is_final:
                self._is_final = True
                self._correct(routing_map)
            assert self.shared is not None
            return self.shared
        assert routing_map is not None
        self._await_parameters()
        counts_DE = self._host_counts(routing_map)
        # Without reentrance, a recomputed pass fills the graph of the first one, so it must have its slots.
        own = self.gradients.own_of(counts_DE) if in_backward() else None
        if own is None:
            own = self._make(self._plan_after_gate(counts_DE, plan, 1), counts_DE, is_shared=False)
            self.gradients.own.append(own)
        own.is_recomputed = in_backward()
        if self._is_counted:
            self.counts.count_on_host(counts_DE, own, self.load, self.measure)
            if not self.clock.driven:
                self.history.append(counts_DE)
                # The gate has noted the schedule of this pass already.
                noted = {name: getattr(self.load, name) for name in ("schedule", "schedule_predicted_s")}
                self.load = replace(LayerLoad.empty(self.context), **noted)
        return own

    def _use(self, one: SlotPass | None) -> None:
        if one is not None and one is not self._current:
            self._current = one
            self.on_pass(one)

    @property
    def _in_use(self) -> SlotPass:
        """The pass of the running forward pass.

        Raises:
            RuntimeError: No pass has been prepared.
        """
        if self._current is None:
            raise RuntimeError(
                f"{self.experts.what}: got a step of a forward pass without a plan, wanted a plan first; "
                "call SlotLayer.prepare() before the routing is remapped"
            )
        return self._current

    @property
    def _transfers(self) -> ReplicaTransfers | None:
        """Transfers of the iteration's plan."""
        return None if self.shared is None else self.shared.transfers

    def _await_parameters(self) -> None:
        """Wait for the Parameters of the last optimizer step.

        Ranks with copies of the same experts gather them together, and their plans differ. So this place must
        not depend on a plan.
        """
        if self.groups.transfers is not None:
            self.experts.await_parameters()

    # Begin and end.

    def finish_gradients(self) -> None:
        """Bring all remaining gradients to the owners and wait; every rank of the group must call it."""
        self.gradients.finish()

    def end_iteration(self) -> LayerLoad:
        """Close the iteration: add its counts to the history, and drop its plan and its replicas.

        Returns:
            Loads, bytes and times of the iteration.

        Raises:
            RuntimeError: Some gradients have not reached the owners, so the optimizer would miss them.
        """
        if not self.is_home:
            raise RuntimeError(
                f"{self.experts.what}: the iteration ended before all replicas' gradients reached their "
                "owners; call MoERuntime.finish_gradients() before reading gradients"
            )
        load = self._take_load()
        self._drop()
        if load.counts_DE.any():
            self.history.append(load.counts_DE)
        return load

    def reset(self) -> None:
        """Begin the passes of the iteration anew: gradients and counts are dropped, the plan stays."""
        self._begin_anew()
        self._take_load()
        self._use(self.shared)

    def _drop(self) -> None:
        self._begin_anew()
        self._current = None
        super()._drop()

    def _begin_anew(self) -> None:
        """Drop replicas, gradients and counts, after a wait for the transfers that use their memory."""
        if self._transfers is not None:
            self._transfers.drop()
        self.gradients.begin_anew()
        self._is_counted = self._is_final = False
        self.counts.clear()

    def _take_load(self) -> LayerLoad:
        load, self.load = self.load, LayerLoad.empty(self.context)
        if self.shared is not None and isinstance(self.strategy, AutoStrategy):
            load.strategy = self.strategy.selected(self.context.layer)
        for timer in self.journal:
            load.add(timer)
        self.journal.clear()
        if self.stopwatch is not None:
            self.stopwatch.iteration_ends()
        return load

    def counted(self) -> torch.Tensor | None:
        """This rank's numbers of the iteration that other ranks need (:meth:`SlotCounts.to_share`)."""
        return self.counts.to_share(self.shared)

    def take_counts(self, numbers_SN: np.ndarray) -> None:
        """Add the numbers of all ranks, which :meth:`counted` returned there, int64 by rank."""
        self.counts.take(numbers_SN, self.shared, self.load, self.measure)
