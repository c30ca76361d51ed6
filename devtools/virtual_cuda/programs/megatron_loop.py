"""Lets Megatron's own training loop run on a virtual CUDA device.

The virtual device replaces what Megatron asks of ``torch.cuda`` and of NCCL. This module lists what else
Megatron cannot do without a GPU, and by what it is replaced. The patches with which the plugin trains on CPU
ranks (``megatron_adapter/cpu``) stay inactive: Megatron and the plugin take their CUDA branches.

Give Megatron ``--transformer-impl local`` and switch its fused kernels off, and do not give
``--use-cpu-initialization``: with it, Megatron leaves the parameters on the CPU on a GPU too, if
``--use-distributed-optimizer`` does not move them.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from devtools.virtual_cuda.books.virtual_device import VirtualDevice
from devtools.virtual_cuda.posing.patches import Patches
from devtools.virtual_cuda.session import virtual_cuda
from megatron_fssdp.megatron_adapter.cpu.cpu_replacements import (
    experts_of_this_rank,
    norm_under_sequence_parallelism,
)
from megatron_fssdp.megatron_adapter.wrapping import wrapped

_CPU_RUNTIME = "megatron_fssdp.megatron_adapter.cpu.cpu_runtime"
_modes_of_main_thread: list[Any] = []


def _reading_states(original: Any) -> Callable[..., Any]:
    return lambda *_, **__: torch.default_generator.get_state()


def _writing_states(original: Any) -> Callable[..., Any]:
    return lambda new_state, *_, **__: torch.default_generator.set_state(new_state)


def _inside_the_device_modes(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run in a thread of its own; modes are active only in the thread that entered them."""
    with _modes_of_main_thread[-1]:
        return original(*args, **kwargs)


def _on_the_stream_of_its_node(original: Callable[..., Any]) -> Callable[..., Any]:
    """What autograd does on CUDA: a leaf's gradient is accumulated on the stream on which its node was made.

    Megatron makes these nodes on a stream of their own. The end of the backward pass joins the streams.
    """

    @functools.wraps(original)
    def make(ddp: Any, parameter: torch.nn.Parameter) -> Callable[..., None]:
        hook, own = original(ddp, parameter), torch.cuda.current_stream()

        def run(*unused: Any) -> None:
            producing = torch.cuda.current_stream()
            own.wait_stream(producing)
            if parameter.grad is not None:
                parameter.grad.record_stream(own)
            with torch.cuda.stream(own):
                hook(*unused)
            end_of_pass = torch.autograd.Variable._execution_engine.queue_callback
            end_of_pass(lambda: producing.wait_stream(own))

        return run

    return make


_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"

REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    # Megatron's checkpoints and recompute save and restore the device's random states. Megatron looked these
    # functions up when it was imported.
    "torch.cuda.random:get_rng_state": _reading_states,
    "torch.cuda.random:set_rng_state": _writing_states,
    "megatron.core.tensor_parallel.random:_get_cuda_rng_state": _reading_states,
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state": _writing_states,
    # Megatron refuses torch's norms under sequence parallelism; others need Transformer Engine or Apex.
    "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__": functools.partial(
        wrapped, norm_under_sequence_parallelism
    ),
    # Parameters that are drawn on the host are those of CPU ranks.
    "megatron.core.transformer.moe.experts:SequentialMLP.__init__": functools.partial(
        wrapped, experts_of_this_rank
    ),
    f"{_DDP}._make_backward_post_hook": _on_the_stream_of_its_node,
    # The data loader's thread for page-locked memory.
    "torch.utils.data._utils.pin_memory:_pin_memory_loop": functools.partial(
        wrapped, _inside_the_device_modes
    ),
}
"""From ``module:attribute`` to the function that makes its replacement from the original."""


@contextmanager
def megatron_on_virtual_cuda(**options: Any) -> Iterator[VirtualDevice]:
    """Give this process a virtual CUDA device on which Megatron can train.

    Takes the options of :func:`virtual_cuda`. The process group and Megatron's modules may exist before.
    Functions that Megatron compiles run without compilation, so that the device sees their operators.
    """
    cpu_runtime = sys.modules.get(_CPU_RUNTIME)
    if cpu_runtime is not None and cpu_runtime._installed:
        raise RuntimeError(
            "virtual CUDA: got a process in which the patches for CPU ranks are active, wanted one without "
            "them; set MEGATRON_FSSDP_DEVICE=cuda before the plugin is registered"
        )
    with Patches() as patches, virtual_cuda(**options) as device:
        _modes_of_main_thread.append(_get_current_function_mode_stack()[-1])
        try:
            for place, replacement in REPLACEMENTS.items():
                module, _, attribute = place.partition(":")
                owner, *parts = importlib.import_module(module), *attribute.split(".")
                for part in parts[:-1]:
                    owner = getattr(owner, part)
                patches.put(owner, {parts[-1]: replacement(getattr(owner, parts[-1]))})
            with torch.compiler.set_stance("force_eager"):
                yield device
        finally:
            _modes_of_main_thread.pop()
