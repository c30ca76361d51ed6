"""Autograd nodes around a layer that gather its replicas and send their gradients to the owners.

In the forward pass, read the drawing from left to right; in the backward pass, from right to left. Steps in
parentheses take place only under re-materialization (Hecate §4.2)::

    node      launch ─ attention, gate ─ materialize ─ dispatch ─ experts ─ end_use ─ combine ─ release
    forward   spAG starts                                    spAG ends                           (free memory)
    backward  spRS ends                  spRS starts                      (spAG ends)            (spAG starts)

Transfers without a process group of their own run in turn with the dispatch, so spAG then ends at
``materialize`` and, in the backward pass, at ``release``. Each node passes the hidden states through. Every
rank therefore runs the backward pass of every node, in one fixed order relative to the dispatch all-to-all.
This includes a rank that owns no expert of the layer but has a replica. ``launch`` (``LayerExecutor.launch``)
is for models that can tell where the compute before the layer begins. Without it, SparseAllGather and
SparseReduceScatter start and end at ``materialize``.

Parameters take no part in autograd. Owners receive the raw sums of their own and of their replicas' gradients
in ``main_grad`` (or ``grad`` without Megatron's DDP). Scaling and the data-parallel reduction follow later,
see ``megatron_adapter.experts.gradient_sync``. The exception is a group of one device, which cannot have
replicas: its Parameters stay in autograd, and Megatron reduces their gradients together with those of dense
Parameters.

Shape letters: R rows that a rank receives, M model dimension.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.experts.expert_layout import ExpertWeights
from megatron_fssdp.runtime.replicas.replica_gradients import add_to_owner, open_gradient
from megatron_fssdp.runtime.replicas.replica_weights import ReplicaWeights, WeightState

GradientsOfExperts = dict[int, Sequence[torch.Tensor | None]]
"""By expert, the gradients of its tensors; ``None`` for those that are in a sum already."""


class Materialization:
    """The present experts of one layer in one forward pass and its backward pass.

    Args:
        placement: Owners and replicas of the experts.
        device: Device number of this rank.
        weights: Weights of this rank's replicas, gathered or in transfer, and Parameters of owned experts.
        transfer: Transfer that gathers all replicas of the placement.
        rematerialize: Whether to free the replicas after the forward pass and gather them again before the
            backward pass (Hecate's re-materialization).
        in_turn: Whether the replicas must be complete before the dispatch, because transfers use the same
            process group. Otherwise :meth:`await_weights` waits for them.
        beside_dispatch: Whether the gather starts together with the dispatch. :meth:`apply` then takes the
            rows that have arrived instead of the hidden states before the dispatch.
        on_backward: Function that is called with the replicas' gradients at the end of a backward pass. This
            happens once for each training micro-batch, and never in an evaluation or for a forward pass that
            is recomputed.
        after_backward: Function that is called after the last transfer of this backward pass has started.
        gradient_sums: Function that returns fp32 or wider sums for the gradients of this device's replicas,
            flat ``[numel]`` by expert. If it is given, the experts' backward pass adds the gradients of
            weights to the attribute ``main_grad`` of the weights' tensors, and autograd gets none of them.
            Transformer Engine's layers do this (``fuse_wgrad_accumulation``).
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        device: int,
        weights: ReplicaWeights,
        transfer: SparseTransfer,
        *,
        rematerialize: bool,
        in_turn: bool = True,
        beside_dispatch: bool = False,
        on_backward: Callable[[GradientsOfExperts], None],
        after_backward: Callable[[], object] | None = None,
        gradient_sums: Callable[[Sequence[int]], Mapping[int, torch.Tensor]] | None = None,
    ) -> None:
        self.present = placement.experts_on(device)
        self.weights = weights
        self.transfer = transfer
        self.rematerialize = rematerialize
        self.in_turn = in_turn
        self.beside_dispatch = beside_dispatch
        self.on_backward = on_backward
        self.after_backward = after_backward
        self.gradient_sums = gradient_sums
        self.alone = placement.num_devices == 1
        self.before: Materialization | None = None
        """The layer before this one in the same forward pass; the backward pass needs its replicas next."""
        self._tensors: list[torch.Tensor] = []

    def apply(
        self, hidden: torch.Tensor, *, wait: bool | None = None
    ) -> tuple[torch.Tensor, list[ExpertWeights]]:
        """Thread the hidden states through the node whose backward pass starts SparseReduceScatter.

        Args:
            hidden: Hidden states that the dispatcher will send, or with ``beside_dispatch`` the rows that it
                has received; any shape.
            wait: Whether to wait for the replicas; ``None`` waits if transfers run in turn with the dispatch.
                Without the wait, their weights are complete after :meth:`await_weights`.

        Returns:
            The hidden states, and the weights of the present experts, ascending by expert.
        """
        # The anchor gives the node an input that requires a gradient even if the hidden states do not, for
        # example above frozen layers or in a layer that is used alone.
        anchor = torch.empty(0, device=hidden.device, requires_grad=True)
        hidden, *tensors = _Materialize.apply(self, self.in_turn if wait is None else wait, anchor, hidden)
        if self.alone:
            tensors = [parameter for expert in self.present for parameter in self.weights.parameters[expert]]
        elif self.gradient_sums is not None and tensors and tensors[0].requires_grad:
            self._tensors = tensors
        count = len(self.weights.layout.shapes)
        experts = [ExpertWeights.from_tensors(tensors[i : i + count]) for i in range(0, len(tensors), count)]
        return hidden, experts

    def await_weights(self) -> None:
        """Wait for the replicas, immediately before the experts compute."""
        if not self.alone:
            self.weights.wait()

    def end_use(self, rows: torch.Tensor) -> torch.Tensor:
        """Thread the experts' results through the node at which their backward pass begins.

        The backward pass of the node waits for the weights, and provides the memory for their gradients.

        Args:
            rows: Results of the present experts, ``[R, M]``.
        """
        if self.alone or not (self.rematerialize or self._tensors):
            return rows
        return call_in_backward(self._begin_backward, rows)

    def _begin_backward(self) -> None:
        if self.rematerialize:
            self.weights.wait()
        if self.gradient_sums is None or not self._tensors:
            return
        owned = self.weights.parameters
        sums = self.gradient_sums([expert for expert in self.present if expert not in owned])
        tensors = iter(self._tensors)
        for expert in self.present:
            targets = (
                [open_gradient(parameter) for parameter in owned[expert]]
                if expert in owned
                else self.weights.layout.unpack(sums[expert])
            )
            for target in targets:
                next(tensors).main_grad = target  # type: ignore[attr-defined]

    def release(self, output: torch.Tensor) -> torch.Tensor:
        """Thread the layer's output through the node that frees the replicas' memory.

        Args:
            output: Output of the layer after combine, any shape.
        """
        if not self.rematerialize or self.alone:
            return output
        return _Release.apply(self, output)

    def regather(self) -> None:
        """Start to gather the replicas, unless their transfer has started."""
        if self.weights.state is WeightState.OWNED:
            self.weights.start(self.transfer)

    def finish_backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add owned experts' gradients to their Parameters, and pass the replicas' to ``on_backward``.

        Args:
            gradients: Gradients of all tensors of the present experts, ascending by expert; ``None`` for
                those that are in ``main_grad`` already.
        """
        self._tensors = []
        count = len(self.weights.layout.shapes)
        of_replicas: GradientsOfExperts = {}
        for i, expert in enumerate(() if self.alone else self.present):
            of_expert = gradients[i * count : (i + 1) * count]
            if expert in self.weights.parameters:
                add_to_owner(self.weights.parameters[expert], of_expert)
            else:
                of_replicas[expert] = of_expert
        if self.rematerialize:
            self.weights.release()
        self.on_backward(of_replicas)
        before, self.before = self.before, None
        if before is not None:
            before.regather()
        if self.after_backward is not None:
            self.after_backward()


def call_in_backward(call: Callable[[], None], hidden: torch.Tensor) -> torch.Tensor:
    """Thread the hidden states through a node whose backward pass calls ``call()``."""
    threaded: torch.Tensor = _CallInBackward.apply(call, hidden)
    return threaded


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], hidden: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.call()
        return None, gradients[0]


class _Materialize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, materialization: Materialization, wait: bool, anchor: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.materialization = materialization
        ctx.set_materialize_grads(materialization.gradient_sums is None)
        ctx.save_for_backward(anchor)
        tensors: list[torch.Tensor] = []
        if not materialization.alone:
            tensors = materialization.weights.tensors(materialization.present, wait=wait)
        return (hidden.view_as(hidden), *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        # Megatron's 1F1B schedule keeps this graph until its next forward pass is over. The graph must not
        # keep a micro-batch's replicas alive for so long, so it drops its reference here.
        materialization, ctx.materialization = ctx.materialization, None
        materialization.finish_backward(gradients[1:])
        (anchor,) = ctx.saved_tensors
        return None, None, torch.zeros_like(anchor), gradients[0]


class _Release(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, materialization: Materialization, output: torch.Tensor) -> torch.Tensor:
        ctx.materialization = materialization
        if not in_backward():
            materialization.weights.release()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.materialization.regather()
        if ctx.materialization.in_turn:
            # The backward pass of combine follows. Its messages must not mix with those of the transfer.
            ctx.materialization.await_weights()
        return None, gradients[0]


def in_backward() -> bool:
    """Whether a backward pass is running in this thread, for example while a forward pass is recomputed."""
    running: int = torch._C._current_graph_task_id()
    return running != -1
