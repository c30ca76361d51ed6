"""Autograd nodes around a layer that bring replicas in and their gradients home.

::

    forward      spAG starts            spAG ends                      (end_use)  replicas go
                 launch ── attention, gate ── materialize ── dispatch, experts ── combine ── release
    backward     spRS ends              spRS starts                    spAG ends  spAG starts

Each passes the hidden states through: every rank then runs its backward, in one fixed order
against the dispatch all-to-all, also a rank that owns nothing of the layer but holds a
replica. ``launch`` (``LayerExecutor.launch``) is for models that can say where the compute
before the layer begins; without it everything happens at ``materialize``. ``end_use`` and
``release`` do something only under re-materialization (Hecate §4.2).

Parameters stay out of autograd. Owners receive the raw sums of their own and of their
replicas' gradients in ``main_grad`` (or ``grad`` without Megatron's DDP); scaling and the
data-parallel reduction follow later, see ``megatron_adapter.experts.gradient_sync``. Only a group
of one device, where nothing can be replicated, leaves its Parameters in autograd: Megatron
reduces them together with the dense ones.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_fssdp.collectives.sparse.sparse_transfer import SparseTransfer
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.experts.expert_layout import ExpertWeights
from megatron_fssdp.runtime.replicas.replica_gradients import add_to_owner
from megatron_fssdp.runtime.replicas.replica_weights import ReplicaWeights, WeightState

GradientsOfExperts = dict[int, Sequence[torch.Tensor]]


class Materialization:
    """One layer's present experts in one forward pass and its backward.

    Args:
        placement: Where the experts are.
        device: This rank's device number.
        weights: The replicas' weights, gathered or being gathered, and the Parameters that are here.
        transfer: SparseAllGather of all replicas of the placement.
        rematerialize: Give the replicas back after the forward pass and gather them again
            before the backward pass (Hecate's re-materialization).
        beside_dispatch: The replicas come while the tokens are dispatched: :meth:`apply` is for the rows that
            have arrived.
        on_backward: Called with the replicas' gradients at the end of a backward pass, once a
            training micro-batch: not in an evaluation or a forward pass that is recomputed.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        device: int,
        weights: ReplicaWeights,
        transfer: SparseTransfer,
        *,
        rematerialize: bool,
        beside_dispatch: bool = False,
        on_backward: Callable[[GradientsOfExperts], None],
    ) -> None:
        self.present = placement.experts_on(device)
        self.weights = weights
        self.transfer = transfer
        self.rematerialize = rematerialize
        self.beside_dispatch = beside_dispatch
        self.on_backward = on_backward
        self.alone = placement.num_devices == 1
        self.before: Materialization | None = None
        """The layer before this one in the same pass, whose replicas the backward pass needs next."""

    def apply(self, hidden: torch.Tensor, *, wait: bool = True) -> tuple[torch.Tensor, list[ExpertWeights]]:
        """Thread the hidden states through the end of SparseAllGather.

        Args:
            hidden: What the dispatcher is going to send, or with ``beside_dispatch`` has received, any shape.
            wait: For the replicas; else their weights are complete after ``weights.wait()``.

        Returns:
            The hidden states, and the weights of the present experts, ascending.
        """
        # The anchor gives the node an input that requires a gradient even where the
        # hidden states do not (frozen layers below, a layer used alone).
        anchor = torch.empty(0, device=hidden.device, requires_grad=True)
        hidden, *tensors = _Materialize.apply(self, wait, anchor, hidden)
        if self.alone:
            tensors = [parameter for expert in self.present for parameter in self.weights.parameters[expert]]
        count = len(self.weights.layout.shapes)
        experts = [ExpertWeights.from_tensors(tensors[i : i + count]) for i in range(0, len(tensors), count)]
        return hidden, experts

    def end_use(self, rows: torch.Tensor) -> torch.Tensor:
        """Thread the experts' results through the point before which backward needs the weights.

        Args:
            rows: Results of the present experts.
        """
        if not self.rematerialize or self.alone:
            return rows
        return call_in_backward(self.weights.wait, rows)

    def release(self, output: torch.Tensor) -> torch.Tensor:
        """Thread the layer's output through the release of its replicas.

        Args:
            output: The combined output, any shape.
        """
        if not self.rematerialize or self.alone:
            return output
        return _Release.apply(self, output)

    def regather(self) -> None:
        """Start to gather the replicas that the backward pass needs, unless they are on their way."""
        if self.weights.state is WeightState.OWNED:
            self.weights.start(self.transfer)

    def finish_backward(self, gradients: Sequence[torch.Tensor]) -> None:
        """Owned experts' gradients to their Parameters, replicas' to whoever sends them home."""
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


def call_in_backward(call: Callable[[], None], hidden: torch.Tensor) -> torch.Tensor:
    """The hidden states, threaded through a node whose backward calls ``call()``."""
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
        ctx.save_for_backward(anchor)
        tensors: list[torch.Tensor] = []
        if not materialization.alone:
            tensors = materialization.weights.tensors(materialization.present, wait=wait)
        return (hidden.view_as(hidden), *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        # Whoever keeps the graph, as Megatron's 1F1B does until its next forward pass is over, keeps no
        # replicas with it: those of one micro-batch end here.
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
        return None, gradients[0]


def in_backward() -> bool:
    """Whether a backward pass is running in this thread, as it is when a forward is recomputed."""
    running: int = torch._C._current_graph_task_id()
    return running != -1
