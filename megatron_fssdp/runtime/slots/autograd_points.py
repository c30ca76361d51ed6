"""Points of the backward pass at which a layer has something to do."""

from collections.abc import Callable

import torch


def call_in_backward(call: Callable[[], object], tensor: torch.Tensor) -> torch.Tensor:
    """Call ``call()`` once in the backward pass, when the gradient of a tensor is complete.

    The pass must go on with the result. It requires a gradient even if ``tensor`` does not, as above frozen
    layers, so that the backward pass reaches this point. Without gradients nothing happens. A second backward
    pass through the same graph is a RuntimeError.
    """
    if not torch.is_grad_enabled():
        return tensor
    if not tensor.requires_grad:
        tensor = tensor.detach().requires_grad_()
    # Megatron's 1F1B schedule keeps a graph until its next forward pass is over. The reference is dropped in
    # the call, so that the graph does not keep a micro-batch's replicas alive for so long.
    calls = [call]

    def run(_: torch.Tensor) -> None:
        if not calls:
            raise RuntimeError(
                "MoE layer: got a second backward pass through the graph of one forward pass (retain_graph), "
                "wanted one; run the forward pass again, or use --moe-strategy none"
            )
        calls.pop()()

    tensor.register_hook(run)
    return tensor


def in_backward() -> bool:
    """Whether a backward pass is running in this thread, for example while a forward pass is recomputed."""
    running: int = torch._C._current_graph_task_id()
    return running != -1
