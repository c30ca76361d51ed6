"""What happens to one MoE layer around its passes: iterations end or begin anew, and owners change."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ParametersByExpert
from megatron_fssdp.runtime.layers.home_gradients import HomeGradients
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.runtime.layers.layer_passes import LayerPasses
from megatron_fssdp.runtime.layers.layer_planner import LayerPlanner
from megatron_fssdp.runtime.layers.local_layer import LocalLayer
from megatron_fssdp.runtime.layers.pass_binder import PassBinder, SlotPass
from megatron_fssdp.runtime.layers.slot_counts import SlotCounts
from megatron_fssdp.runtime.slots.autograd_points import in_backward


@dataclass(eq=False, kw_only=True)
class LayerLifecycle(LocalLayer):
    """A layer with its parts, and its iterations; owners, residents and costs change only between them.

    The fields are arguments of :class:`PassBinder`, :class:`LayerPasses`, :class:`HomeGradients` and
    :class:`SlotCounts`.
    """

    planner: LayerPlanner
    before: Self | None = None  # the MoE layer before it on this rank
    least_slots: int = 0
    slot_multiple: int = 1
    on_pass: Callable[[SlotPass], object] = lambda slot_pass: None
    on_home: Callable[[], object] = lambda: None
    measures_spread: bool = False
    is_counted: bool = False  # the running forward pass

    def __post_init__(self) -> None:
        super().__post_init__()
        self.planner.layers.append(self)
        # Passes outside of iterations leave the tables of graphs alone.
        inside, outside = (PassBinder(self, self.least_slots, self.slot_multiple) for _ in range(2))
        before: LayerPasses | None = self.before.passes if self.before else None
        self.passes: LayerPasses = LayerPasses(self, self.planner, inside, outside, before, self.on_pass)
        self.gradients = HomeGradients(self, self.passes, self.on_home)
        self.counts = SlotCounts(self, measures_spread=self.measures_spread)

    def own(self, owner_E: np.ndarray, parameters: ParametersByExpert, layout: ExpertLayout) -> None:
        """Set new owners, int64 ``[E]``, without resident replicas.

        A rank that owns no expert, and thus has no ``parameters``, needs the layout.
        """
        self.drop_plan()
        self.experts = replace(self.experts, parameters=parameters, residents={}, told_layout=layout)
        self.context = replace(self.context, owner_E=owner_E, resident=None)

    def keep(self, placement: ExpertPlacement, residents: ParametersByExpert) -> None:
        """Set new resident replicas, by Parameters with the owners' contents."""
        self.drop_plan()
        self.context = replace(self.context, resident=placement)
        self.experts = replace(self.experts, residents=residents)

    def end_iteration(self) -> LayerLoad:
        """Close the iteration: add its counts to the history, drop its plan and replicas, return its load.

        Raises:
            RuntimeError: Some gradients have not reached the owners, so the optimizer would miss them.
        """
        if not self.gradients.is_home:
            raise RuntimeError(
                f"{self.experts.what}: the iteration ended before all replicas' gradients reached "
                "their owners; call MoERuntime.finish_gradients() before reading gradients"
            )
        load, context = self._take_load(), self.context
        if self.journal is not None and not load.placements:  # Other groups may have had passes.
            load.placements = (ExpertPlacement.owners_only(context.owner_E, context.num_devices),)
        self.gradients.note_iteration()
        self.drop_plan()
        if load.counts_DE.any():
            self.history.append(load.counts_DE, load.micro_batches)
        return load

    def prepare_capture(self, *, training: bool) -> None:
        """Provide the slots for a CUDA graph that is captured: its tensors keep their addresses."""
        self.is_counted = training and not in_backward()  # Graphs of evaluations are other ones.
        self.passes.choose_to_capture(is_counted=self.is_counted)
        if self.is_counted:
            self.counts.open(self.passes.in_use, None)

    def reset(self) -> None:
        """Begin the passes of the iteration anew: gradients and counts are dropped, the plan stays."""
        has_begun = not self.counts.is_clear or bool(self.journal)
        self._begin_anew()
        if has_begun:
            self._take_load()
        if self.passes.shared is not None:
            self.passes.use(self.passes.shared)

    def drop_plan(self) -> None:
        """Begin the iteration anew without its plan."""
        self._begin_anew()
        self.passes.forget()

    def _begin_anew(self) -> None:
        self.passes.begin_anew()
        self.gradients.begin_anew()
        self.counts.clear()

    def _take_load(self) -> LayerLoad:
        shared, load, self.load = self.passes.shared, self.load, LayerLoad.empty(self.context)
        if shared is not None:
            load.strategy = self.strategy.selected(self.context.layer)
        if self.journal is not None:
            load.take(self.journal, self.timer, in_steps=shared is not None and shared.plan.in_steps)
        if self.stopwatch is not None:
            self.stopwatch.iteration_ends()
        return load
