"""What happens to one MoE layer around its passes: iterations end or begin anew, and owners change."""

from dataclasses import replace

import numpy as np

from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.experts.expert_layout import ParametersByExpert
from megatron_fssdp.runtime.layers.home_gradients import HomeGradients
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.runtime.layers.layer_passes import LayerPasses
from megatron_fssdp.runtime.layers.slot_counts import SlotCounts
from megatron_fssdp.runtime.slots.autograd_points import in_backward


class LayerLifecycle:
    """The parts of one layer and its iterations; owners and resident replicas change only between them."""

    def __init__(self, passes: LayerPasses, gradients: HomeGradients, counts: SlotCounts) -> None:
        self.passes, self.gradients, self.counts, self.local = passes, gradients, counts, passes.local
        self.groups, self.clock, self.history = self.local.groups, self.local.clock, self.local.history
        self.is_counted = False  # the running forward pass

    def prepare_capture(self, *, training: bool) -> None:
        """Provide the slots for a CUDA graph that is captured: its tensors keep their addresses."""
        self.is_counted = training and not in_backward()  # Graphs of evaluations are other ones.
        self.passes.choose_to_capture(is_counted=self.is_counted)
        if self.is_counted:
            self.counts.open(self.passes.in_use, None)

    def own(self, owner_E: np.ndarray, parameters: ParametersByExpert) -> None:
        """Set new owners, int64 ``[E]``, without resident replicas.

        A rank may own no expert, and have no ``parameters``.
        """
        self.drop_plan()
        experts = self.local.experts
        told = experts.layout(), experts.device
        self.local.experts = replace(experts, parameters=parameters, residents={}, told=told)
        self.local.context = replace(self.local.context, owner_E=owner_E, resident=None)

    def keep(self, placement: ExpertPlacement, residents: ParametersByExpert) -> None:
        """Set new resident replicas, by Parameters with the owners' contents."""
        self.drop_plan()
        self.local.context = replace(self.local.context, resident=placement)
        self.local.experts = replace(self.local.experts, residents=residents)

    def end_iteration(self) -> LayerLoad:
        """Close the iteration: add its counts to the history, drop its plan and replicas, return its load.

        Raises:
            RuntimeError: Some gradients have not reached the owners, so the optimizer would miss them.
        """
        if not self.gradients.is_home:
            raise RuntimeError(
                f"{self.local.experts.name}: the iteration ended before all replicas' gradients reached "
                "their owners; call MoERuntime.finish_gradients() before reading gradients"
            )
        load, context = self._take_load(), self.local.context
        if self.local.journal is not None and not load.placements:  # Other groups may have had passes.
            load.placements = (ExpertPlacement.owners_only(context.owner_E, context.num_devices),)
        self.gradients.note_iteration()
        self.drop_plan()
        if load.counts_DE.any():
            self.local.history.append(load.counts_DE, load.micro_batches)
        return load

    def reset(self) -> None:
        """Begin the passes of the iteration anew: gradients and counts are dropped, the plan stays."""
        has_begun = not self.counts.is_clear or bool(self.local.journal)
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
        local, plan = self.local, self.passes.plan
        load, local.load = local.load, LayerLoad.empty(local.context)
        if plan is not None:
            load.strategy = local.strategy.selected(local.context.layer)
        if local.journal is not None:
            load.take(local.journal, local.timer, in_steps=plan is not None and plan.in_steps)
        if local.stopwatch is not None:
            local.stopwatch.iteration_ends()
        return load
