"""Points of the backward pass at which a layer has something to do."""

from collections.abc import Callable
from typing import Any

import torch


def call_in_backward(call: Callable[[], object], tensor: torch.Tensor) -> torch.Tensor:
    """Thread a tensor through a node whose backward pass calls ``call()``.

    The node runs in the backward pass even if the tensor itself requires no gradient, for example above
    frozen layers. Without gradients (evaluation, the first pass of activation recomputation) there is no
    node.

    Args:
        call: Function without arguments.
        tensor: Any tensor of the pass.
    """
    if not torch.is_grad_enabled():
        return tensor
    anchor = torch.empty(0, device=tensor.device, requires_grad=True)
    threaded: torch.Tensor = _CallInBackward.apply(call, anchor, tensor)
    return threaded


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Callable[[], object], anchor: torch.Tensor, tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.call = call
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        # Megatron's 1F1B schedule keeps this graph until its next forward pass is over. The reference is
        # dropped here, so that the graph does not keep a micro-batch's replicas alive for so long.
        call, ctx.call = ctx.call, None
        call()
        return None, None, gradients[0]


def in_backward() -> bool:
    """Whether a backward pass is running in this thread, for example while a forward pass is recomputed."""
    running: int = torch._C._current_graph_task_id()
    return running != -1
