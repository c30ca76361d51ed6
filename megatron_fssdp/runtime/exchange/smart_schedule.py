"""FasterMoE's smart schedule (§4.2): dispatch, experts and combine as one autograd node, group by group.

The forward and the backward pass run the same exchange in steps (``collectives/rows/grouped_exchange.py`` has
a drawing). In the forward pass, rows travel to the experts and results travel back. In the backward pass, the
results' gradients travel to the experts and the rows' gradients travel back. Each step has a separate
autograd graph for the experts. Saved-tensor hooks around the layer do not apply to it: the hooks of
non-reentrant recomputation would run a forward pass in the middle of the backward exchange, and other ranks
would wait for it. Under such recomputation, the experts' activations are therefore kept.

Shape letters: A rows that a rank sends, R rows that a rank receives, M model dimension, G experts present
on a device, S ranks that send rows, D devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from megatron_fssdp.collectives.rows.grouped_exchange import exchange_in_steps
from megatron_fssdp.planning.placement.group_ring import GroupRing
from megatron_fssdp.runtime.exchange.arrival_order import ArrivalOrder
from megatron_fssdp.runtime.exchange.token_exchange import DispatchRecord
from megatron_fssdp.runtime.experts.expert_layout import ExpertWeights

ExpertCompute = Callable[[Tensor, Tensor, Sequence[int], Sequence[ExpertWeights]], Tensor]
"""From rows ``[R, M]`` by present expert, their probabilities ``[R]``, the rows of each expert and the
experts' weights to results ``[R, M]``."""


def _nothing() -> None:
    """Do nothing."""


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, eq=False)
class SmartSchedule:
    """One micro-batch's dispatch, experts and combine in steps.

    Attributes:
        record: Ranks to which this rank's rows go and ranks from which it receives rows.
        ring: The groups of expert-parallel ranks that exchange rows in turn.
        group: Process group of the expert-parallel ranks.
        compute: The experts' forward pass for the rows of one step.
        before_forward: Function that is called in the forward pass before the compute of the first step,
            while rows of later steps travel.
        await_weights: Function that waits for replicas' weights that are still in transfer. The backward pass
            calls it before the first step. The forward pass calls it before every step with rows for such a
            replica and before the last step. The rows of earlier steps are computed in the meantime
            (FasterMoE, §4.2, Fig. 7).
        travels_G: Whether the weights of each present expert may still be in transfer, bool ``[G]``.
    """

    record: DispatchRecord
    ring: GroupRing
    group: dist.ProcessGroup
    compute: ExpertCompute
    before_forward: Callable[[], object] = _nothing
    await_weights: Callable[[], object] = _nothing
    travels_G: Sequence[bool] = ()

    def run(self, rows: Tensor, probs: Tensor, experts: Sequence[ExpertWeights]) -> Tensor:
        """Run all steps and return the results of the rows that this rank sent, ``[A, M]``.

        Every rank of the group must call it, even without rows. ``rows`` must require a gradient on all ranks
        or on none, and so must ``probs``.

        Args:
            rows: Rows in the order of sending, ``[A, M]``.
            probs: Routing probabilities of these rows, ``[A]``.
            experts: Weights of the present experts, ascending by expert.
        """
        tensors = [tensor for expert in experts for tensor in expert.tensors()]
        per_expert = len(tensors) // len(experts) if experts else 0
        builds = torch.is_grad_enabled()
        results: Tensor = _SmartScheduledExperts.apply(self, per_expert, builds, rows, probs, *tensors)
        return results

    def needs_weights(self, step: int) -> bool:
        """Whether a step has rows for an expert whose weights may be in transfer, or is the last step.

        The last step always waits, so that all weights are complete after the forward pass.
        """
        received_SG = self.record.received_SG[list(self.ring.senders(step))]
        return step == self.ring.num_steps - 1 or bool(received_SG[:, np.flatnonzero(self.travels_G)].any())

    def of_step(self, step: int, rows: Tensor, probs: Tensor, experts: Sequence[ExpertWeights]) -> Tensor:
        """The experts' results for the rows of one step, in the order in which the rows arrived.

        Experts without rows in the step take no part. Otherwise the backward pass of every step would write
        gradients of zeros for them; most rows for a replica come from its own device, in one step.

        Args:
            step: Number of the step.
            rows: Rows of the step by source, then expert, ``[R, M]``.
            probs: Routing probabilities of these rows, ``[R]``.
            experts: Weights of the present experts, ascending by expert.
        """
        received_SG = self.record.received_SG[list(self.ring.senders(step))]
        used_G = np.flatnonzero(received_SG.any(axis=0))
        received_SG = received_SG[:, used_G]
        used = [experts[g] for g in used_G.tolist()]
        order = ArrivalOrder(received_SG, rows.device)
        results = self.compute(*order.sort_by_expert(rows, probs), received_SG.sum(axis=0).tolist(), used)
        return order.sort_by_source(results)


class _SmartScheduledExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        schedule: SmartSchedule,
        per_expert: int,
        builds: bool,
        rows: Tensor,
        probs: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        needs = ctx.needs_input_grad[3:]
        builds = builds and any(needs)
        leaves = [
            x.detach().requires_grad_(builds and need) for x, need in zip(tensors, needs[2:], strict=True)
        ]
        experts = [
            ExpertWeights.from_tensors(leaves[i : i + per_expert])
            for i in range(0, len(leaves), per_expert or 1)
        ]
        kept: list[tuple[Tensor, Tensor, Tensor]] = []

        def compute(step: int, received: Sequence[Tensor]) -> list[Tensor]:
            if not step:
                schedule.before_forward()
            if schedule.needs_weights(step):
                schedule.await_weights()
            inputs = [
                x.detach().requires_grad_(builds and need) for x, need in zip(received, needs, strict=False)
            ]
            with torch.set_grad_enabled(builds), saved_tensors_hooks(_unchanged, _unchanged):
                output = schedule.of_step(step, inputs[0], inputs[1], experts)
            if builds:
                kept.append((inputs[0], inputs[1], output))
            return [output.detach()]

        results = torch.empty_like(rows)
        record = schedule.record
        exchange_in_steps(
            [rows.contiguous(), probs.contiguous()],
            [results],
            record.send_D,
            record.receive_D,
            compute,
            schedule.ring,
            schedule.group,
        )
        ctx.schedule, ctx.kept, ctx.leaves = schedule, kept, leaves
        ctx.like = rows.new_empty(0), probs.new_empty(0)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        schedule, kept, leaves = ctx.schedule, ctx.kept, ctx.leaves
        # The caller may keep the graph for longer than the weights may live, so it must not hold them.
        ctx.schedule = ctx.leaves = None
        needs_rows, needs_probs, *needs_weights = ctx.needs_input_grad[3:]
        record = schedule.record

        def compute(step: int, received: Sequence[Tensor]) -> list[Tensor]:
            if not step:
                schedule.await_weights()
            rows, probs, output = kept[step]
            kept[step] = None  # This frees the activations of the step after its backward pass.
            if output.requires_grad:
                # Not torch.autograd.grad: recomputation inside the experts refuses to run under it. The
                # leaves sum up the weights' gradients of all steps.
                torch.autograd.backward(output, received[0])
            return [_gradient(x) for x, need in ((rows, needs_rows), (probs, needs_probs)) if need]

        like_rows, like_probs = ctx.like
        num_rows = sum(record.send_D)
        back: list[Tensor] = []
        if needs_rows:
            back.append(like_rows.new_empty(num_rows, *gradient.shape[1:]))
        if needs_probs:
            back.append(like_probs.new_empty(num_rows))
        exchange_in_steps(
            [gradient.contiguous()],
            back,
            record.send_D,
            record.receive_D,
            compute,
            schedule.ring,
            schedule.group,
        )
        weights = [
            _gradient(leaf) if need else None for leaf, need in zip(leaves, needs_weights, strict=True)
        ]
        gradients = iter(back)
        return (
            None,
            None,
            None,
            next(gradients) if needs_rows else None,
            next(gradients) if needs_probs else None,
            *weights,
        )


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
