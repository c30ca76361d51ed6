"""What happens to one MoE layer around its passes: iterations end or begin anew, and owners change."""

from dataclasses import replace

import numpy as np

from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.clocks.layer_stopwatch import LayerStopwatch
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ParametersByExpert
from megatron_fssdp.runtime.layers.home_gradients import HomeGradients
from megatron_fssdp.runtime.layers.layer_load import LayerLoad
from megatron_fssdp.runtime.layers.layer_passes import LayerPasses
from megatron_fssdp.runtime.layers.slot_counts import SlotCounts
from megatron_fssdp.runtime.layers.slot_pass import SlotPass


class LayerLifecycle:
    """The iterations of one layer, and what is counted and measured in them.

    Owners, resident replicas and costs change only between iterations. With ``measures_spread``, equal on all
    ranks, they count on how many nodes and devices the experts of a token are.
    """

    def __init__(self, passes: LayerPasses, gradients: HomeGradients, *, measures_spread: bool) -> None:
        self.passes, self.gradients, self._local = passes, gradients, passes.local
        context = passes.local.context
        # Of the running iteration, on the host and on the device.
        self.load = LayerLoad.empty(context)
        self.counts = SlotCounts(context.topology, context.owner_E, measures_spread)
        self.stopwatch: LayerStopwatch | None = None  # while costs are measured

    def renumber(self, layer: int) -> None:
        """Set the layer number, which the model assigns after it has built its layers."""
        local, self.load.layer = self._local, layer
        local.context = replace(local.context, layer=layer)
        local.experts = replace(local.experts, what=f"layer {layer}")

    def begin_chunk(self, *, is_first: bool) -> None:
        """Say whether the model chunk has no MoE layer before this one, once the model is built."""
        self._local.is_first = is_first

    def measure_costs(self, stopwatch: LayerStopwatch) -> None:
        """Measure passes with a stopwatch, until the layer has a profile."""
        self.stopwatch = stopwatch

    def set_profile(self, profile: LayerProfile) -> None:
        """Set the costs of the layer, equal on all ranks that plan together."""
        self._local.context = replace(self._local.context, profile=profile)
        self.stopwatch = None

    def own(self, owner_E: np.ndarray, parameters: ParametersByExpert, layout: ExpertLayout) -> None:
        """Set new owners, int64 ``[E]``, without resident replicas.

        A rank that owns no expert, and thus has no ``parameters``, needs the layout.
        """
        self.drop_plan()
        local = self._local
        local.experts = replace(local.experts, parameters=parameters, residents={}, told_layout=layout)
        local.context = replace(local.context, owner_E=owner_E, resident=None)

    def keep(self, placement: ExpertPlacement, residents: ParametersByExpert) -> None:
        """Set new resident replicas, by Parameters with the owners' contents."""
        self.drop_plan()
        self._local.context = replace(self._local.context, resident=placement)
        self._local.experts = replace(self._local.experts, residents=residents)

    def count_without_remap(self, slot_pass: SlotPass) -> None:
        """Count a pass whose counts the host knows, or provide the row to which a CUDA graph counts."""
        counts_DE, measures = slot_pass.counts_DE, self._local.journal is not None
        if counts_DE is None:
            self.counts.open(slot_pass, self._local.experts.device, in_graph=True)
        else:
            self.counts.count_on_host(counts_DE, slot_pass, self.load, measures)

    def end_iteration(self) -> LayerLoad:
        """Close the iteration: add its counts to the history, drop its plan and replicas, return its load.

        Raises:
            RuntimeError: Some gradients have not reached the owners, so the optimizer would miss them.
        """
        if not self.gradients.is_home:
            raise RuntimeError(
                f"{self._local.experts.what}: the iteration ended before all replicas' gradients reached "
                "their owners; call MoERuntime.finish_gradients() before reading gradients"
            )
        load, context = self._take_load(), self._local.context
        if self._local.journal is not None and not load.placements:  # Other groups may have had passes.
            load.placements = (ExpertPlacement.owners_only(context.owner_E, context.num_devices),)
        self.gradients.note_iteration()
        self.drop_plan()
        if load.counts_DE.any():
            self._local.history.append(load.counts_DE, load.micro_batches)
        return load

    def reset(self) -> None:
        """Begin the passes of the iteration anew: gradients and counts are dropped, the plan stays."""
        self._begin_anew()
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
        local, shared = self._local, self.passes.shared
        load, self.load = self.load, LayerLoad.empty(local.context)
        if shared is not None:
            load.strategy = local.strategy.selected(local.context.layer)
        if local.journal is not None:
            load.take(local.journal, local.timer, in_steps=shared is not None and shared.plan.in_steps)
        if self.stopwatch is not None:
            self.stopwatch.iteration_ends()
        return load
