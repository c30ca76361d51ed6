"""Makes Megatron's DDP wait for the experts' gradients, and the experts wait for DDP's parameters.

**Gradients.** The experts' Parameters take no part in autograd: the runtime adds the raw gradient sums
to ``main_grad`` itself. DDP must therefore not reduce a bucket of experts over the expert-data-parallel
ranks before the backward pass is over and all replicas' gradients are at their owners. With
``--overlap-grad-reduce``, pipeline schedules start bucket groups too early. Two methods of DDP's bucket
groups are therefore wrapped once. A bucket group that holds our experts then takes these steps::

    start_grad_sync     with the overlap:     does nothing
                        without the overlap:  Megatron's own method, called from finish_grad_sync
    finish_grad_sync    1. completes the experts' gradients in the owners' main_grad
                        2. with the overlap:  starts the reduction, unless it was started already
                        3. Megatron's own method waits for the reduction

The call of ``finish_grad_sync`` is the only event that marks the end of the last backward pass both
with and without pipeline parallelism.

**Parameters.** With ``--overlap-param-gather``, DDP updates parameters in forward pre-hooks of the modules
that own them. The runtime never calls these modules, so :func:`await_parameters` runs their hooks.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

_MARK = "gradient_finished_by_fssdp"
_installed = False


def take_over(parameters: Iterable[torch.nn.Parameter], finish_gradients: Callable[[], None]) -> None:
    """Declare that the runtime delivers the gradients of these Parameters.

    Parameters that DDP reduces together with the dense ones (expert parallelism of size 1) stay in
    autograd, and this function ignores them.

    Args:
        parameters: Parameters of experts.
        finish_gradients: Function that completes the gradients of these Parameters. It is called before
            DDP reduces them, on all ranks in the same order, and more than once in an iteration.
    """
    for parameter in parameters:
        if not getattr(parameter, "allreduce", True):
            setattr(parameter, _MARK, finish_gradients)
            _install()


def await_parameters(experts: torch.nn.Module) -> None:
    """Finish the parameter all-gather that DDP overlaps with the forward pass.

    Args:
        experts: Module whose submodules hold the experts' Parameters.
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
    """Return the function that completes the gradients of a bucket group.

    It is ``None`` for a bucket group without Parameters whose gradients the runtime delivers.
    """
    return next((f for parameter in group.params if (f := getattr(parameter, _MARK, None))), None)
