"""Keeps Megatron's DDP and the experts' own gradient path in step.

The experts' Parameters take no part in autograd: the runtime adds the raw gradient sums to
``main_grad`` itself. DDP must therefore not reduce an expert bucket over the expert
data-parallel ranks before the backward pass is through and all replicas' gradients have come
home. With ``--overlap-grad-reduce`` it could: schedules start bucket groups early. The two
bucket-group methods are wrapped, once, so that a group holding our experts first brings the
gradients home and starts its reduction when it is asked to finish it; without the overlap
Megatron does the latter already. Nothing else tells the end of the last backward pass alike
with and without pipeline parallelism.

DDP's ``--overlap-param-gather`` in turn updates parameters in forward pre-hooks of their
own modules, which our experts never call: :func:`await_parameters` runs those hooks.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

_MARK = "gradient_finished_by_fssdp"
_installed = False


def take_over(parameters: Iterable[torch.nn.Parameter], finish_gradients: Callable[[], None]) -> None:
    """Declare parameters whose gradients the runtime delivers.

    Parameters that DDP reduces with the dense ones (expert parallelism of size 1) stay
    in autograd and are left alone.

    Args:
        parameters: Of the experts.
        finish_gradients: Completes their gradients; called before DDP reduces them, on all ranks
            in the same order, and more than once.
    """
    for parameter in parameters:
        if not getattr(parameter, "allreduce", True):
            setattr(parameter, _MARK, finish_gradients)
            _install()


def await_parameters(experts: torch.nn.Module) -> None:
    """Finish the parameter all-gather that DDP overlaps with the forward pass.

    Args:
        experts: The module whose submodules hold the experts' parameters.
    """
    for module in experts.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if getattr(hook, "__qualname__", "").startswith("DistributedDataParallel._make_forward_pre_hook"):
                hook(module)


def _install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    start = _ParamAndGradBucketGroup.start_grad_sync
    finish = _ParamAndGradBucketGroup.finish_grad_sync

    @wraps(start)
    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _finish_gradients(self) is not None and self.ddp_config.overlap_grad_reduce:
            return None
        return start(self, *args, **kwargs)

    @wraps(finish)
    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        finish_gradients = _finish_gradients(self)
        if finish_gradients is not None:
            finish_gradients()
            if (
                self.ddp_config.overlap_grad_reduce
                and self.grad_reduce_handle is None
                and not self.grad_reduce_finished
            ):
                start(self, *args, **kwargs)
        return finish(self, *args, **kwargs)

    _ParamAndGradBucketGroup.start_grad_sync = start_grad_sync
    _ParamAndGradBucketGroup.finish_grad_sync = finish_grad_sync


def _finish_gradients(group: Any) -> Callable[[], None] | None:
    """What completes the gradients of a bucket group of ours; ``None`` for Megatron's own."""
    return next((f for parameter in group.params if (f := getattr(parameter, _MARK, None))), None)
