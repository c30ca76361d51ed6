"""Runs Megatron on CPU ranks over gloo, for laptops, tests and CI.

Megatron assumes CUDA in many places: tensor factories with ``device="cuda"``, streams, CUDA random states
and arguments that only NCCL accepts. On a machine without an accelerator, :func:`install` gives these calls
a meaning on the CPU. On a machine with an accelerator it does nothing, unless
``MEGATRON_FSSDP_DEVICE=cpu`` is set.

There are two kinds of changes. Both are made here and nowhere else:

* :class:`CpuDeviceMode`, a :class:`torch.overrides.TorchFunctionMode`, replaces CUDA device arguments by the
  CPU. This is one rule instead of a wrapper for each tensor factory.
* :data:`_TORCH_PATCHES` and :data:`_MEGATRON_PATCHES` list the attributes that are replaced, each with its
  reason. ``torch.cuda.is_available()`` stays or becomes ``False``, because ``True`` breaks dynamo and
  ``torch.optim``.
"""

import contextlib
import functools
import importlib
import os
import types
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.cpu.cpu_collectives import (
    uneven_all_gather,
    uneven_reduce_scatter,
    without_device_ids,
)
from megatron_fssdp.megatron_adapter.cpu.cpu_device import (
    CpuDeviceMode,
    FinishedStream,
    HostEvent,
    inside_the_device_mode,
)
from megatron_fssdp.megatron_adapter.cpu.cpu_megatron import (
    attention_of_other_widths,
    find_dataset_helpers,
    move_to_host,
    norm_under_sequence_parallelism,
)

DEVICE_VARIABLE = "MEGATRON_FSSDP_DEVICE"

_installed = False


def requested() -> bool:
    """Whether this process should run Megatron on the CPU.

    Raises:
        ConfigurationError: The environment variable ``MEGATRON_FSSDP_DEVICE`` names an unknown device.
    """
    asked = os.environ.get(DEVICE_VARIABLE, "").lower()
    if asked not in ("", "cpu", "cuda"):
        raise ConfigurationError(
            f"environment variable {DEVICE_VARIABLE}: got {asked!r}, wanted 'cpu' or 'cuda'; "
            "unset it to detect the device"
        )
    return asked == "cpu" or (asked == "" and not torch.cuda.is_available())


def install() -> bool:
    """Apply the CPU patches if the CPU is requested. Repeated calls have no further effect.

    Returns:
        Whether the CPU patches are active in this process.
    """
    global _installed
    if not requested():
        return False
    if not _installed:
        _installed = True
        # With tensor or context parallelism, Megatron's argument check wants this variable. It orders
        # CUDA's work queues and has no effect on the CPU.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        # The mode stays active until the process ends.
        CpuDeviceMode().__enter__()
        for patch in _TORCH_PATCHES:
            patch.apply()
        for patch in _MEGATRON_PATCHES:
            patch.apply()
    return True


def check_arguments(args: Any) -> None:
    """Refuse what Megatron cannot do on the CPU, before its process groups exist.

    Args:
        args: Megatron's parsed arguments.

    Raises:
        ConfigurationError: The arguments ask for context parallelism on the CPU.
    """
    if _installed and (args.context_parallel_size or 1) > 1:
        raise ConfigurationError(
            f"--context-parallel-size: got {args.context_parallel_size} on the CPU, wanted 1, because "
            "Megatron's context parallelism uses Transformer Engine's attention, which needs a GPU; use "
            "--tensor-model-parallel-size 2 --sequence-parallel to split sequences, or run on GPUs"
        )


@dataclass(frozen=True)
class _Patch:
    """Attributes of one module or class that are replaced, with the reason.

    Attributes:
        target: ``package.module`` or ``package.module:Class``.
        names: Names of the replaced attributes, separated by spaces.
        replacement: Function from the original attribute to its replacement.
        reason: Why the CPU needs the replacement.
        may_be_missing: Whether the attributes exist only where an optional package is installed.
    """

    target: str
    names: str
    replacement: Callable[[Any], Any]
    reason: str
    may_be_missing: bool = False

    def apply(self) -> None:
        owner = _resolve(self.target)
        for name in self.names.split():
            original = getattr(owner, name, None) if self.may_be_missing else getattr(owner, name)
            setattr(owner, name, self.replacement(original))


def _resolve(target: str) -> Any:
    """Return the module or class that ``package.module`` or ``package.module:Class`` names."""
    module, _, attribute = target.partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, attribute) if attribute else owner


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _returning(value: Any) -> Callable[[Any], Any]:
    # Every name gets a new function, because dynamo refuses one function object under two names.
    return lambda original: lambda *_, **__: value


_TORCH_PATCHES = (
    _Patch("torch.cuda", "is_available", _returning(False), "the CPU may be requested on a GPU machine"),
    _Patch(
        "torch.cuda",
        "device_count",
        _returning(1),
        "with 0 devices Megatron skips its process groups and seeding",
    ),
    _Patch("torch.cuda", "current_device", _returning(0), "Megatron passes it on as a device argument"),
    _Patch("torch.cuda", "set_device synchronize", _returning(None), "there is no device to set or wait for"),
    _Patch("torch.cuda", "Stream", _always(FinishedStream), "dispatcher and optimizer make side streams"),
    _Patch("torch.cuda", "Event", _always(HostEvent), "timers and the ordering of streams use events"),
    _Patch("torch.cuda", "current_stream", _returning(FinishedStream()), "streams wait for each other"),
    _Patch("torch.cuda", "stream", _returning(contextlib.nullcontext()), "code runs inside side streams"),
    _Patch("torch.cuda", "memory_stats", _returning(defaultdict(int)), "--log-memory-to-tensorboard uses it"),
    _Patch(
        "torch.cuda",
        "get_device_properties",
        _returning(types.SimpleNamespace(major=0, minor=0, total_memory=0, name="cpu")),
        "the argument checks of tensor and context parallelism read it",
    ),
    _Patch(
        "torch:Tensor",
        "record_stream",
        _returning(None),
        "the combined schedule of forward and backward passes names the streams that use a tensor",
    ),
    # The CPU has one random generator. It replaces the CUDA generator in the next three patches.
    _Patch(
        "torch.cuda",
        "manual_seed",
        _always(lambda seed: torch.default_generator.manual_seed(seed)),
        "Megatron seeds model-parallel random states",
    ),
    _Patch(
        "torch.cuda",
        "get_rng_state",
        _always(lambda *_, **__: torch.get_rng_state()),
        "checkpoints and recompute save the random state",
    ),
    _Patch(
        "torch.cuda",
        "set_rng_state",
        _always(lambda state, *_, **__: torch.set_rng_state(state)),
        "checkpoints and recompute restore the random state",
    ),
    _Patch(
        "torch.autograd.function:BackwardCFunction",
        "apply",
        inside_the_device_mode,
        "activation recompute runs forward code inside torch.autograd.backward",
    ),
    _Patch("torch.distributed", "barrier", without_device_ids, "gloo refuses an argument of NCCL"),
    _Patch(
        "torch.distributed",
        "all_gather",
        uneven_all_gather,
        "expert tensor parallelism gathers tensors of different sizes, which gloo refuses",
    ),
    _Patch(
        "torch.distributed",
        "reduce_scatter",
        uneven_reduce_scatter,
        "expert tensor parallelism sums tensors of different sizes, which gloo refuses",
    ),
)

_MEGATRON_PATCHES = (
    _Patch(
        "megatron.core.datasets.utils",
        "compile_helpers",
        find_dataset_helpers,
        "it runs make, which needs a Makefile, pybind11 and a compiler",
    ),
    _Patch(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        _always(lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)),
        "dropout under recompute restores the random state",
    ),
    _Patch(
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        _always(lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()),
        "dropout under recompute saves the random state",
    ),
    # Megatron imports these names with Transformer Engine only. Its experts use them also without fp8.
    _Patch(
        "megatron.core.tensor_parallel.random",
        "FP8GlobalStateManager",
        _always(types.SimpleNamespace(is_fp8_enabled=lambda: False)),
        "recomputed activations of experts ask whether fp8 is on",
        may_be_missing=True,
    ),
    _Patch(
        "megatron.core.tensor_parallel.random",
        "activation_recompute_forward fp8_autocast",
        _returning(contextlib.nullcontext()),
        "recomputed activations of experts tell Transformer Engine about the recomputation",
        may_be_missing=True,
    ),
    _Patch(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _always(move_to_host),
        "it turns only CUDA tensors of split sizes into numbers, and gloo needs numbers",
    ),
    _Patch(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm",
        "__new__",
        norm_under_sequence_parallelism,
        "sequence parallelism must work without Transformer Engine and Apex",
    ),
    _Patch(
        "megatron.core.transformer.dot_product_attention:DotProductAttention",
        "__init__",
        attention_of_other_widths,
        "multi-latent attention has values of another width, which only Transformer Engine's class accepts",
    ),
    _Patch(
        "megatron.training.training",
        "initialize_megatron",
        lambda original: functools.partial(original, allow_no_cuda=True),
        "pretrain() does not pass allow_no_cuda on",
    ),
)
