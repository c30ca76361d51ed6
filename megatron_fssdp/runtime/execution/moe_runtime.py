"""All MoE layers of this rank under one strategy, and the clock of iterations."""

from typing import Any

from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.execution.iteration_clock import IterationClock
from megatron_fssdp.runtime.execution.layer_executor import LayerExecutor
from megatron_fssdp.runtime.execution.layer_load import LayerLoad
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ParametersByExpert
from megatron_fssdp.runtime.replicas.local_experts import LocalExperts
from megatron_fssdp.strategies.strategy import LayerContext, Strategy


class MoERuntime:
    """Executors of all layers of a model that share a strategy.

    Iterations are marked by :meth:`begin_iteration` where a training loop is known (the
    Megatron adapter does it), see :class:`IterationClock`.

    Args:
        strategy: Decides for every layer.
        measure: Keep the device loads that reports show, on the first device of each group.
        check_plans: Compare every plan across ranks.
    """

    def __init__(self, strategy: Strategy, *, measure: bool = False, check_plans: bool = False) -> None:
        self.strategy = strategy
        self.measure = measure
        self.check_plans = check_plans
        self.layers: list[LayerExecutor] = []
        self.clock = IterationClock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "MoERuntime":
        # Layer specs carry the runtime and Megatron deep-copies specs; the layers of
        # one model must still meet in one runtime.
        return self

    def add_layer(
        self,
        context: LayerContext,
        groups: ExpertGroups,
        parameters: ParametersByExpert,
        *,
        layout: ExpertLayout | None = None,
    ) -> LayerExecutor:
        """Register a layer; layers must be added in the same order on every rank.

        Args:
            context: What the strategy may know of the layer.
            groups: Process group and topology.
            parameters: Parameters of each expert this rank owns, by expert.
            layout: Shapes of one expert's tensors, for ranks that own none.
        """
        executor = LayerExecutor(
            context,
            groups,
            LocalExperts(f"layer {context.layer}", parameters, told_layout=layout),
            self.strategy,
            self.clock,
            # Every rank of the group knows the whole group's loads: one works them out.
            measure=self.measure and groups.device == 0,
            check_plans=self.check_plans,
        )
        if self.layers:
            self.layers[-1].following = executor
            executor.is_first = False
        self.layers.append(executor)
        return executor

    def begin_iteration(self, num_micro_batches: int | None = None, iteration: int | None = None) -> None:
        """Mark the start of an iteration: plans are made anew from the loads so far.

        Args:
            num_micro_batches: Backward passes to come, where the loop knows and calls
                :meth:`finish_gradients` before it reads any gradient; see :class:`IterationClock`.
            iteration: Its number, for messages.
        """
        self.clock.driven = True
        for layer in self.layers:
            layer.end_iteration()
        self.clock.num_micro_batches = num_micro_batches
        self.clock.iteration = iteration
        self.clock.latest = None

    def repeat_iteration(self) -> None:
        """Mark that the running iteration starts over, with the same parameters and the same data.

        Its plans are made anew from the same loads, its weights gathered anew.
        """
        for layer in self.layers:
            layer.drop_iteration()
        self.clock.latest = None

    def finish_gradients(self) -> None:
        """Bring all replicas' gradients to their owners; on every rank, after the last backward pass."""
        for layer in self.layers:
            layer.finish_gradients()

    def end_iteration(self) -> list[LayerLoad]:
        """Mark the end of an iteration; what each layer did in it, in order of registration."""
        self.clock.num_micro_batches = None
        self.clock.iteration = None
        self.clock.latest = None
        return [layer.end_iteration() for layer in self.layers]
