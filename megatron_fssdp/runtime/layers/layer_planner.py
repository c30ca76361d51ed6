"""Asks the strategy for the plans of one MoE layer.

Shape letters: T tokens, D devices, E experts.
"""

import numpy as np
import torch

from megatron_fssdp.collectives.gathered_counts import start_counts
from megatron_fssdp.collectives.plan_agreement import check_agreement
from megatron_fssdp.collectives.trace_names import traced
from megatron_fssdp.runtime.layers.local_layer import LocalLayer
from megatron_fssdp.runtime.layers.shared_plans import SharedPlans
from megatron_fssdp.strategies.layer_plan import LayerPlan
from megatron_fssdp.strategies.layer_planning import plan_after_gate


class LayerPlanner:
    """Plans a layer by its history, alone or ``together`` with the other ranks of its group.

    ``checks_plans`` compares the plans of all ranks before they are used.
    """

    def __init__(self, local: LocalLayer, together: SharedPlans, *, checks_plans: bool = False) -> None:
        self._local, self._together, self._checks_plans = local, together, checks_plans
        together.layers.append(local)

    @traced("plan")
    def plan_iteration(self, *, is_captured: bool = False) -> LayerPlan:
        """The plan of the running iteration, from the loads of earlier ones.

        For a CUDA graph that is captured, any plan will do where ranks would share theirs.
        """
        local = self._local
        if self._together.are_divided and local.lacks_plan:
            if is_captured:  # No message can be captured. Any plan has the same tensors.
                local.planned = local.context.owners_only
            else:
                self._together.make(local.experts.device)
        plan = local.planned = local.planned or local.plan_before_gate()
        self._compare(plan)
        return plan

    def plan_after_gate(
        self, counts_DE: np.ndarray, plan: LayerPlan, num_micro_batches: int | None = None
    ) -> LayerPlan:
        """The plan for the counts of a micro-batch; it serves so many, by default all of the iteration."""
        times = num_micro_batches or max(self._local.clock.num_micro_batches, 1)
        new = plan_after_gate(self._local.strategy, self._local.context, counts_DE, plan, times)
        if new is not plan:
            self._compare(new)
        return new

    def host_counts(self, routing_map: torch.Tensor) -> np.ndarray:
        """Counts of a micro-batch, bool ``[T, E]``, on all devices, int64 ``[D, E]``; the host waits."""
        groups = self._local.groups
        counts = start_counts(routing_map.sum(0), groups.expert_parallel, groups.expert_tensor_parallel)
        counts_DE: np.ndarray = counts.wait().numpy().sum(axis=0)
        return counts_DE

    def _compare(self, plan: LayerPlan) -> None:
        if not self._checks_plans:
            return
        groups, iteration = self._local.groups, self._local.clock.iteration
        what = f"the plan of layer {self._local.context.layer}"
        if iteration is not None:
            what += f" in iteration {iteration}"
        for group in (groups.expert_parallel, groups.expert_tensor_parallel):
            if group is not None:
                check_agreement(plan.digest(), group, what)
