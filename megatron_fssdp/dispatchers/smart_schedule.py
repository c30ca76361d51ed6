"""FasterMoE's smart schedule (§4.2) as a dispatcher: dispatch, experts and combine run in steps.

Megatron's all-to-all dispatcher counts the rows and brings them into the order of sending. Its phases between
the permutation and its inverse pass the rows on, and :meth:`SmartScheduleTokenDispatcher.compute_in_steps`,
which the layer calls in place of the experts, does their work in one autograd node.

**Steps.** The ranks form n groups, and the groups form a ring. In step j, a rank sends rows to group
``own - j`` (``Sj``), computes on the rows that came from group ``own + j`` (``Cj``), and sends the results
back (``Rj``)::

    messages    S0 S1    R0 S2    R1 S3    R2       R3
    compute        C0       C1       C2       C3

Step 0 is the exchange within the own group, which uses no slow links. If something else must arrive before
the own group's rows can be computed (``GroupRing.own_last``), every other step comes one earlier and the own
group comes last. The rows of a step leave just before the compute of the step before. If a device has one
connection (``CUDA_DEVICE_MAX_CONNECTIONS=1``), its kernels wait in the order of their issue, and the first
compute would otherwise wait for nearly all rows.

**Backward pass.** It runs the same steps with gradients in place of rows and results. Each step has a
separate autograd graph for the experts, so hooks on their Parameters, also DDP's, run once for each step.
Saved-tensor hooks around the layer do not apply to the experts: those of non-reentrant
recomputation would run a forward pass in the middle of the backward exchange, and other ranks would wait for
it. Under such recomputation, the experts' activations are therefore kept. Reentrant recomputation, which is
Megatron's own, works as usual.

**Combined 1F1B schedule** (``overlap_moe_expert_parallel_comm``). All communication is then in the segment of
the experts, so that schedule hides none of it. Results are right: the segment ``moe_dispatch`` copies rows
and probabilities, because Megatron frees its input, and nothing else refers to the input of a segment.

Shape letters: A rows that a rank sends, R rows that a rank receives, M model dimension, D devices, U slots of
a device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from megatron_fssdp.collectives.messages import start_exchange, wait_for
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.planning.placement.topology import GroupRing

Experts = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, None]]
"""The forward pass of Megatron's expert module: from rows ``[R, M]`` by slot, the number of rows of each slot
(int64 ``[U]`` on the host) and the rows' probabilities ``[R]`` to results ``[R, M]`` and no bias."""

_ROWS_TAG, _RESULTS_TAG = 1 << 17, (1 << 17) + 1  # Other exchanges over the same group use small tags.


class SmartScheduleTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher, with dispatch, experts and combine in steps over a ring of groups.

    Experts must be whole, and their weight gradients must not be delayed: Megatron can delay those of one run
    of the experts only. The positional arguments are Megatron's, over slots: ``config.num_moe_experts`` is
    D * U. The ring is seen from this rank.
    """

    def __init__(self, *arguments: Any, ring: GroupRing) -> None:
        super().__init__(*arguments)
        self.ring = ring
        self._counts_DU = torch.empty(0)

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Count rows as Megatron does, but keep the sources of those for this device's slots, ``[D, U]``."""
        counts = super().preprocess(routing_map)
        if self.num_local_experts > 1:
            counts = self.num_global_tokens_per_local_expert
        elif self.ep_size > 1:
            counts = self.output_splits
        return counts.reshape(self.ep_size, self.num_local_experts)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Wait for the counts, and run overlapped shared experts; rows and probabilities stay as they are."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act()
            self.shared_experts.linear_fc2_forward()
            self.shared_experts.post_forward_comm()
        counts = self.tokens_per_expert
        for point in ("before_ep_alltoall", "before_permutation_2", "before_finish"):
            counts = self._maybe_dtoh_and_synchronize(point, counts)  # Megatron waits at one of them.
        self._counts_DU = counts
        if self.config.overlap_moe_expert_parallel_comm:
            return hidden_states.clone(), probs.clone()
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows, the numbers of rows that this device's slots will get (``[U]``), and the probs."""
        return hidden_states, self._counts_DU.sum(dim=0), probs

    def compute_in_steps(
        self,
        rows: Tensor,
        probs: Tensor,
        experts: Experts,
        await_weights: Callable[[], object] | None = None,
        in_transfer: Sequence[int] = (),
    ) -> Tensor:
        """Dispatch the rows, compute the experts and bring the results back, in steps.

        Every rank of the group must call it, even without rows. ``rows`` must require a gradient on all ranks
        or on none, and so must ``probs``.

        Args:
            rows: Rows in the order of sending, ``[A, M]``; the results are in the same order.
            probs: Probabilities of these rows, ``[A]``.
            experts: Forward pass of Megatron's expert module with U slots. It is called once for each step,
                also without rows.
            await_weights: Function that waits for replicas' weights, ``None`` if there are no transfers; all
                ranks agree in this. The forward pass calls it before each step with rows for replicas, and
                before the last step, which is then that of the own group: most rows for replicas come from
                the device itself. Earlier steps compute in the meantime (FasterMoE §4.2, Fig. 7). The
                backward pass calls it before its first step.
            in_transfer: Slots of these replicas, counted from 0. ``experts`` must not use the weights of
                slots without rows; a forward pass that quantizes all weights (fp8) does.
        """
        layer_pass = _Pass(
            replace(self.ring, own_last=await_weights is not None),
            self._counts_DU,
            [int(number) for number in (self.input_splits if self.ep_size > 1 else [len(rows)])],
            experts,
            await_weights or (lambda: None),
            in_transfer,
            # The ranks are those of the expert-parallel group. NCCL needs a group that has run a collective
            # before, here the gather of counts: a rank without messages takes no part in a step.
            self.tp_ep_group,
        )
        # The graph needs this node also if only the experts' Parameters require a gradient.
        anchor = torch.empty(0, device=rows.device, requires_grad=torch.is_grad_enabled())
        results: Tensor = _StepwiseExperts.apply(layer_pass, anchor, rows, probs)
        return results

    def token_combine(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the results of :meth:`compute_in_steps`."""
        return hidden_states

    combine_preprocess = token_combine


@dataclass(frozen=True, eq=False)
class _Pass:
    """What the steps of one forward pass and its backward pass share."""

    ring: GroupRing
    counts_DU: Tensor  # rows for each of this device's slots from each source, int64 on the host
    send_D: list[int]  # rows that this rank sends to each rank
    experts: Experts
    await_weights: Callable[[], object]
    in_transfer: Sequence[int]
    group: dist.ProcessGroup

    def counts_of(self, step: int) -> Tensor:
        """Rows of a step by sender and slot, int64 ``[senders, U]``."""
        senders = self.ring.senders(step)
        return self.counts_DU[senders.start : senders.stop]

    def of_step(self, step: int, rows: Tensor, probs: Tensor) -> Tensor:
        """The experts' results for the rows ``[R, M]`` of one step, in their order: by source, then slot."""
        counts = self.counts_of(step)
        is_sorted = min(counts.shape) == 1
        if not is_sorted:
            by_slot = torch.arange(counts.numel()).view(counts.shape).t().reshape(-1)
            rows, probs = sort_chunks_by_idxs(rows, counts.reshape(-1), by_slot, probs=probs)
        results, _ = self.experts(rows, counts.sum(dim=0), probs)  # which have the bias
        if not is_sorted:
            results, _ = sort_chunks_by_idxs(results, counts.t().reshape(-1), by_slot.argsort())
        return results.to(rows.dtype)

    def exchange(
        self,
        outgoing: Sequence[Tensor],
        results: Sequence[Tensor],
        compute: Callable[[int, Sequence[Tensor]], Sequence[Tensor]],
    ) -> None:
        """Send this rank's rows, compute on received rows, and receive the results of this rank's rows.

        The rows of all ``outgoing`` tensors, ``[A, ...]`` each by destination, travel together, and fill
        ``results``, contiguous, in the same order. ``compute`` gets the number of a step and its rows in the
        order of senders, and returns tensors with as many rows. The host does not wait for a CUDA device.
        """
        ring, receive_D = self.ring, self.counts_DU.sum(dim=1).tolist()
        outgoing = [x.contiguous() for x in outgoing]
        sent_D, returned_D = (
            list(zip(*(tensor.split(self.send_D) for tensor in tensors), strict=True))
            for tensors in (outgoing, results)
        )

        def to_receivers(step: int, parts_D: Sequence[Sequence[Tensor]]) -> list[tuple[int, Tensor]]:
            return [(peer, part) for peer in ring.receivers(step) for part in parts_D[peer]]

        def to_senders(step: int, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
            peers = ring.senders(step)
            sizes = [receive_D[peer] for peer in peers]
            parts = zip(peers, *(tensor.split(sizes) for tensor in tensors), strict=True)
            return [(peer, part) for peer, *of_peer in parts for part in of_peer]

        def send_rows(step: int) -> tuple[list[Tensor], list[dist.Work], list[dist.Work]]:
            num_rows = sum(receive_D[peer] for peer in ring.senders(step))
            buffers = [tensor.new_empty(num_rows, *tensor.shape[1:]) for tensor in outgoing]
            arrive, leave = start_exchange(
                to_receivers(step, sent_D), to_senders(step, buffers), self.group, _ROWS_TAG
            )
            return buffers, arrive, leave

        under_way: list[dist.Work] = []
        kept: list[Sequence[Tensor]] = []  # Messages read this memory until the end.
        coming = send_rows(0)
        for step in range(ring.num_steps):
            buffers, arrive, leave = coming
            if step + 1 < ring.num_steps:
                coming = send_rows(step + 1)
            wait_for(arrive)
            computed = compute(step, buffers)
            kept.append(computed)
            back = start_exchange(
                to_senders(step, computed), to_receivers(step, returned_D), self.group, _RESULTS_TAG
            )
            under_way += [*leave, *back[0], *back[1]]
        wait_for(under_way)


class _StepwiseExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer_pass: _Pass, anchor: Tensor, rows: Tensor, probs: Tensor) -> Tensor:
        needs, builds = ctx.needs_input_grad[2:], anchor.requires_grad
        kept: list[Any] = []

        def compute(step: int, received: Sequence[Tensor]) -> list[Tensor]:
            is_last = step == layer_pass.ring.num_steps - 1  # After it, all weights have arrived.
            if is_last or layer_pass.counts_of(step)[:, list(layer_pass.in_transfer)].any():
                layer_pass.await_weights()
            inputs = [
                x.detach().requires_grad_(builds and need) for x, need in zip(received, needs, strict=True)
            ]
            with torch.set_grad_enabled(builds), saved_tensors_hooks(lambda x: x, lambda x: x):
                output = layer_pass.of_step(step, *inputs)
            if builds:
                kept.append((*inputs, output))
            return [output.detach().contiguous()]

        results = torch.empty_like(rows, memory_format=torch.contiguous_format)
        layer_pass.exchange([rows, probs], [results], compute)
        ctx.layer_pass, ctx.kept = layer_pass, kept
        # New tensors, because Megatron's combined schedule frees the memory of the rows.
        ctx.like = rows.new_empty(0), probs.new_empty(0)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # A step runs its experts' whole backward pass, so Parameters would get gradients without request.
        if not Variable._execution_engine.is_checkpoint_valid():
            raise ConfigurationError(
                "smart_schedule: got torch.autograd.grad() or backward(inputs=...), wanted backward() alone, "
                "because each step computes all gradients of its experts; unset smart_schedule"
            )
        layer_pass, kept, needs = ctx.layer_pass, ctx.kept, ctx.needs_input_grad[2:]
        # The caller may keep the graph for longer than the weights may live, so it must not hold them.
        ctx.layer_pass = ctx.kept = None

        def compute(step: int, received: Sequence[Tensor]) -> list[Tensor]:
            if not step:
                layer_pass.await_weights()
            *inputs, output = kept[step]
            kept[step] = None  # This frees the activations of the step after its backward pass.
            if output.requires_grad:
                # Not torch.autograd.grad: recomputation inside the experts refuses to run under it.
                torch.autograd.backward(output, received[0])
            return [
                torch.zeros_like(x) if x.grad is None else x.grad.contiguous()
                for x, need in zip(inputs, needs, strict=True)
                if need
            ]

        shapes = gradient.shape, gradient.shape[:1]
        back = [
            like.new_empty(shape) if need else None
            for like, shape, need in zip(ctx.like, shapes, needs, strict=True)
        ]
        layer_pass.exchange([gradient], [x for x in back if x is not None], compute)
        return None, None, *back
