"""Lets Megatron's activation checkpoints keep the exchanges of the layers that they run.

``CheckpointFunction`` calls a function in the forward pass and the same function again in the backward pass.
The wrapper passes a :class:`RecomputedFunction` in its place. The kept exchanges thereby live in the
checkpoint's autograd node: several micro-batches in flight have different nodes, and a dropped graph frees
them.

Transformer Engine's checkpoint and ``torch.utils.checkpoint`` are not wrapped. Layers that they recompute
exchange their counts again.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core.tensor_parallel.random import CheckpointFunction

from megatron_fssdp.runtime.execution.kept_exchanges import RecomputedFunction

_MARK = "keeps_exchanges_of_fssdp"


def keep_exchanges_of_checkpoints() -> None:
    """Wrap the forward pass of Megatron's ``CheckpointFunction``; a second call does nothing."""
    forward = CheckpointFunction.forward
    if hasattr(forward, _MARK):
        return

    @wraps(forward)
    def keeping(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, RecomputedFunction(run_function), *args)

    setattr(keeping, _MARK, True)
    CheckpointFunction.forward = staticmethod(keeping)
