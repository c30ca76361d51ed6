"""The runtime of a model: all MoE layers of this rank under one strategy, and the clock of iterations."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_fssdp.runtime.clocks.iteration_clock import IterationClock
from megatron_fssdp.runtime.clocks.pass_timer import LayerTimer, PassTimer
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.execution.layer_executor import LayerExecutor
from megatron_fssdp.runtime.execution.layer_load import LayerLoad
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ParametersByExpert
from megatron_fssdp.runtime.replicas.local_experts import LocalExperts
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.strategy import Strategy


class MoERuntime:
    """The executors of all layers of a model that share a strategy.

    A training loop marks iterations with :meth:`begin_iteration`; the Megatron adapter does this. Without a
    loop, see :class:`IterationClock`.

    Args:
        strategy: Strategy that plans every layer.
        measure: Whether the first device of each group keeps the device loads, bytes and times of transfers
            for reports, and every rank the seconds of its passes.
        check_plans: Whether to compare every plan across ranks.
    """

    def __init__(self, strategy: Strategy, *, measure: bool = False, check_plans: bool = False) -> None:
        self.strategy = strategy
        self.measure = measure
        self.check_plans = check_plans
        self.layers: list[LayerExecutor] = []
        self.clock = IterationClock()
        self.timer = PassTimer()

    def __deepcopy__(self, memo: dict[int, Any]) -> "MoERuntime":
        # Layer specs contain the runtime, and Megatron deep-copies specs. All layers of a model must still
        # share one runtime.
        return self

    def add_layer(
        self,
        context: LayerContext,
        groups: ExpertGroups,
        parameters: ParametersByExpert,
        *,
        layout: ExpertLayout | None = None,
        await_parameters: Callable[[], None] | None = None,
        most_choices: int | None = None,
        fuses_gradients: bool = False,
    ) -> LayerExecutor:
        """Register a layer; layers must be added in the same order on every rank.

        Args:
            context: The data of the layer that the strategy may use.
            groups: Process groups of the layer, and the nodes of its ranks.
            parameters: Parameters of each expert that this rank owns, ascending by expert.
            layout: Shapes of one expert's tensors, needed on a rank that owns no expert.
            await_parameters: Function that returns when the Parameters have the values of the last optimizer
                step; ``None`` if they always have them, see :class:`LocalExperts`.
            most_choices: Largest number of experts that a token selects; ``None`` if it is not known.
            fuses_gradients: Whether the experts' backward pass adds the gradients of weights to the attribute
                ``main_grad`` of the weights' tensors.
        """
        experts = LocalExperts(f"layer {context.layer}", parameters, told_layout=layout)
        if await_parameters is not None:
            experts = replace(experts, await_parameters=await_parameters)
        executor = LayerExecutor(
            context,
            groups,
            experts,
            self.strategy,
            self.clock,
            # Every rank of the group has the loads of the whole group, so only one computes the report.
            measure=self.measure and groups.device == 0,
            measures_spread=self.measure,
            check_plans=self.check_plans,
            most_choices=most_choices,
            fuses_gradients=fuses_gradients,
            timer=LayerTimer(self.timer),
        )
        if self.layers:
            self.layers[-1].following = executor
            executor.is_first = False
        self.layers.append(executor)
        return executor

    def begin_iteration(self, num_micro_batches: int | None = None, iteration: int | None = None) -> None:
        """Mark the start of an iteration; its plans are made from the loads of earlier iterations.

        Args:
            num_micro_batches: Number of backward passes of the iteration. Pass it only if the loop calls
                :meth:`finish_gradients` before it reads any gradient; see :class:`IterationClock`.
            iteration: Number of the iteration, for messages.
        """
        self.clock.driven = True
        self.timer.stop()
        for layer in self.layers:
            layer.end_iteration()
        self.clock.num_micro_batches = num_micro_batches
        self.clock.iteration = iteration
        self.clock.latest = None
        self._start_timer()

    def repeat_iteration(self) -> None:
        """Mark that the running iteration starts again with the same parameters and the same data.

        Its plans are made again from the same loads, and its weights are gathered again.
        """
        for layer in self.layers:
            layer.drop_iteration()
        self.clock.latest = None
        self._start_timer()

    def _start_timer(self) -> None:
        if self.measure:
            self.timer.start()

    def finish_gradients(self) -> None:
        """Bring all replicas' gradients to the owners; every rank calls it after the last backward pass."""
        for layer in self.layers:
            layer.finish_gradients()

    def end_iteration(self) -> list[LayerLoad]:
        """Mark the end of an iteration; return what each layer did in it, in the order of registration."""
        self.clock.num_micro_batches = None
        self.clock.iteration = None
        self.clock.latest = None
        self.timer.stop()
        return [layer.end_iteration() for layer in self.layers]
