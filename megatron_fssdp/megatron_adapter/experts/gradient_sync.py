"""Makes Megatron's DDP wait for the replicas' gradients, and replicas wait for DDP's parameters.

**Gradients.** Megatron's DDP adds gradients of owned experts to ``main_grad``. The sums of their replicas
arrive later, and DDP must not reduce a bucket of experts before. Two methods of its bucket groups are
therefore wrapped once::

    start_grad_sync     waits in a list while a layer of the bucket group misses gradients; it starts as
                        soon as the last of these layers is home, in the middle of the backward pass
    finish_grad_sync    1. completes the gradients of all layers
                        2. starts the reduction if DDP overlaps it and it has not been started
                        3. Megatron's own method

A backward pass after the reduction has started is an error: its gradients would be lost.

On CUDA, autograd runs the hooks of DDP on the stream on which Megatron has made DDP. Only the end of a
backward pass joins it with the stream of the pass. Before that, :func:`await_gradients` orders the two.

**Parameters.** With ``--overlap-param-gather``, DDP updates parameters in forward pre-hooks of their modules.
A gather of replicas comes before these modules run, so :func:`await_parameters` runs their hooks.
"""

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import megatron.core.utils
import torch
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.wrapping import wrap
from megatron_fssdp.runtime.layers.layer_passes import LayerPasses
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer

_SLOT, _LAYERS = "slot_of_fssdp", "layers_of_fssdp"
_IN_STREAM = object()  # the handle of a reduction for which a stream waits
_waiting: dict[Any, Callable[[], object]] = {}  # what starts the reduction of a bucket group
_finishing: list[Any] = []  # A reduction that starts when these groups finish must not wait.
_moves = [0]  # how often Parameters got experts of other layers
_accumulating: set[torch.cuda.Stream] = set()  # Streams on which DDP adds gradients of experts.
_gathering = weakref.WeakSet[Any]()  # DDPs that have hooks to finish gathers of parameters


@dataclass
class _Slot:
    # Weak, because the layer refers to the Parameter. Python collects no cycle through a Parameter that nodes
    # of autograd hold, so a model that its loop drops would stay.
    registered_in: weakref.ref[SlotLayer]  # the layer whose module has the Parameter
    layer: weakref.ref[SlotLayer]  # the layer whose expert the Parameter holds
    finish_gradients: Callable[[], Callable[[], None] | None]


def take_over(
    parameters: Iterable[torch.nn.Parameter], layer: SlotLayer, finish_gradients: Callable[[], None]
) -> None:
    """Declare that replicas add to the gradients of these Parameters of a layer's experts.

    Those that DDP reduces together with the dense ones (expert parallelism of size 1) have no replicas and
    are ignored. ``finish_gradients`` completes the gradients of all layers. It is called before DDP reduces
    them, on all ranks in the same order, and more than once in an iteration. The layer calls
    :func:`start_waiting` when its gradients are home. Tied Parameters are a ConfigurationError.
    """
    for parameter in parameters:
        if not getattr(parameter, "allreduce", True):
            if hasattr(parameter, _SLOT):
                raise ConfigurationError(
                    "experts: got a Parameter that two of them share (tied weights), wanted one for each, "
                    "because experts move and get replicas one by one; untie them, or use --moe-strategy none"
                )
            reference = weakref.ref(layer)
            setattr(parameter, _SLOT, _Slot(reference, reference, weakref.WeakMethod(finish_gradients)))
            _install()


def belong_to(layer: SlotLayer, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Declare that Parameters that were taken over hold experts of a layer from now on."""
    _moves[0] += 1
    for parameter in parameters:
        if (slot := getattr(parameter, _SLOT, None)) is not None:
            slot.layer = weakref.ref(layer)


def await_parameters(experts: torch.nn.Module) -> None:
    """Finish the gather of an expert module's Parameters that DDP overlaps with the forward pass."""
    if hasattr(megatron.core.utils, "ensure_params_ready"):  # after Megatron 0.19
        megatron.core.utils.ensure_params_ready(experts.parameters())
        return
    handles = [ddp.remove_forward_pre_hook_handles for ddp in _gathering]
    for module, of_ddp in product(experts.modules(), handles):
        if module in of_ddp:
            module._forward_pre_hooks[of_ddp[module].id](module)


def await_gradients() -> None:
    """Order the current stream behind all that DDP has added to the gradients of experts so far."""
    for stream in _accumulating:
        torch.cuda.current_stream(stream.device).wait_stream(stream)


def start_waiting() -> None:
    """Start the reductions of bucket groups that wait and whose layers are home."""
    for group in [group for group in _waiting if _is_home(group)]:
        _start_one(group)


def forget_waiting(layers: Collection[SlotLayer]) -> None:
    """Forget reductions of these layers that wait, because their iteration was dropped."""
    for group in [group for group in _waiting if any(layer in layers for layer, _ in _layers(group))]:
        del _waiting[group]


@cache  # once in a process
def _install() -> None:
    wrap(DistributedDataParallel, "enable_forward_pre_hook", _note_hooks)
    wrap(DistributedDataParallel, "_make_backward_post_hook", _note_stream)
    wrap(_ParamAndGradBucketGroup, "start_grad_sync", _start_when_home)
    wrap(_ParamAndGradBucketGroup, "finish_grad_sync", _finish_when_home)


def _note_hooks(enable: Any, ddp: Any) -> None:
    enable(ddp)
    _gathering.add(ddp)


def _note_stream(make: Any, ddp: Any, parameter: torch.nn.Parameter) -> Any:
    if parameter.is_cuda and hasattr(parameter, _SLOT):
        _accumulating.add(torch.cuda.current_stream(parameter.device))
    return make(ddp, parameter)


def _start_when_home(start: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_home(group) and group not in _finishing:
        if group.ddp_config.overlap_grad_reduce:
            _waiting[group] = lambda: _start(start, group, *args, **kwargs)
            return None
        _finish_gradients(group)
    return _start(start, group, *args, **kwargs)


def _start(start: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
    for layer, _ in _layers(group):
        layer.gradients.note_reduction()
    result = start(group, *args, **kwargs)
    if _layers(group) and group.ddp_config.overlap_grad_reduce and group.grad_reduce_handle is None:
        # With several instances of the optimizer, Megatron reduces in a stream and keeps no handle. Without
        # one, the reduction would start again.
        group.grad_reduce_handle = _IN_STREAM
    return result


def _start_one(group: Any) -> bool:
    """Start the reduction of a bucket group if it waits, and return whether it did."""
    if (start := _waiting.pop(group, None)) is None:
        return False
    await_gradients()
    start()
    return True


def _finish_when_home(finish: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
    has_experts = bool(_layers(group))
    if has_experts:
        _finish_gradients(group)
    has_started = _start_one(group)
    _finishing.append(group)
    try:
        if (
            not has_started
            and has_experts
            and group.ddp_config.overlap_grad_reduce
            and group.grad_reduce_handle is None
            and not group.grad_reduce_finished
        ):
            group.start_grad_sync(*args, **kwargs)
        return finish(group, *args, **kwargs)
    finally:
        _finishing.remove(group)
        if group.grad_reduce_handle is _IN_STREAM:
            group.grad_reduce_handle = None


def _finish_gradients(group: Any) -> None:
    slot = next(filter(None, (getattr(parameter, _SLOT, None) for parameter in group.params)))
    slot.finish_gradients()()


def _layers(group: Any) -> list[tuple[SlotLayer, SlotLayer]]:
    """Layers whose experts a bucket group holds, each with a layer that registered Parameters for them."""
    known = getattr(group, _LAYERS, None)
    if known is None or known[0] != _moves[0]:
        slots = [slot for parameter in group.params if (slot := getattr(parameter, _SLOT, None)) is not None]
        pairs = dict.fromkeys((slot.layer(), slot.registered_in()) for slot in slots)
        known = _moves[0], list(pairs)
        setattr(group, _LAYERS, known)
    return known[1]


def _is_home(group: Any) -> bool:
    # The interleaved schedule reduces a model chunk when its own backward passes are over. A Parameter that
    # holds an expert of another chunk gets its gradient later; only the end of all passes is late enough.
    return all(
        layer.gradients.is_home
        and (layer is registered_in or _first(layer.passes) is _first(registered_in.passes))
        for layer, registered_in in _layers(group)
    )


def _first(passes: LayerPasses) -> LayerPasses:
    """Those of the first MoE layer of the model chunk, by which it is known."""
    while not passes.local.is_first and passes.before is not None:
        passes = passes.before
    return passes
