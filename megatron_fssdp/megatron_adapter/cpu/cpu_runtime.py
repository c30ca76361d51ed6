"""Runs Megatron on CPU ranks over gloo, for laptops, tests and CI.

Megatron assumes CUDA in many places: factories with ``device="cuda"``, streams,
CUDA random states, NCCL-only arguments. Without an accelerator, :func:`install`
answers those calls with their CPU meaning. On a machine with an accelerator it
does nothing, unless ``MEGATRON_FSSDP_DEVICE=cpu`` asks for CPU.

Two kinds of change, both switched on here and nowhere else:

* :class:`CpuDeviceMode`, a :class:`torch.overrides.TorchFunctionMode` that turns CUDA device arguments
  into CPU ones, one rule instead of a wrapper per factory;
* :data:`_TORCH_PATCHES` and :data:`_MEGATRON_PATCHES`: attributes replaced, each
  with its reason. ``torch.cuda.is_available()`` stays (or becomes) ``False``:
  claiming otherwise breaks dynamo and ``torch.optim``.
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
    find_dataset_helpers,
    move_to_host,
    norm_under_sequence_parallelism,
)

DEVICE_VARIABLE = "MEGATRON_FSSDP_DEVICE"

_installed = False


def requested() -> bool:
    """Whether this process should run Megatron on the CPU."""
    asked = os.environ.get(DEVICE_VARIABLE, "").lower()
    if asked not in ("", "cpu", "cuda"):
        raise ConfigurationError(
            f"{DEVICE_VARIABLE}: got {asked!r}, wanted 'cpu', 'cuda' or nothing; "
            "unset it to detect the device"
        )
    return asked == "cpu" or (asked == "" and not torch.cuda.is_available())


def install() -> bool:
    """Apply the CPU runtime when it is requested; idempotent.

    Returns:
        Whether the CPU runtime is active in this process.
    """
    global _installed
    if not requested():
        return False
    if not _installed:
        _installed = True
        # Megatron asks for this variable at argument checks of TP or CP > 1; it
        # orders CUDA work queues and means nothing here.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        # Entered for the life of the process.
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
        ConfigurationError: With what is refused and what to do.
    """
    if _installed and (args.context_parallel_size or 1) > 1:
        raise ConfigurationError(
            f"--context-parallel-size: got {args.context_parallel_size} on the CPU, wanted 1: Megatron's "
            "context parallelism is Transformer Engine's attention, which needs a GPU; use "
            "--tensor-model-parallel-size 2 --sequence-parallel to split sequences, or run on GPUs"
        )


@dataclass(frozen=True)
class _Patch:
    """One attribute replaced, and why."""

    target: str
    names: str
    replacement: Callable[[Any], Any]
    reason: str

    def apply(self) -> None:
        owner = _resolve(self.target)
        for name in self.names.split():
            setattr(owner, name, self.replacement(getattr(owner, name)))


def _resolve(target: str) -> Any:
    """``package.module`` or ``package.module:Class``."""
    module, _, attribute = target.partition(":")
    owner = importlib.import_module(module)
    return getattr(owner, attribute) if attribute else owner


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _returning(value: Any) -> Callable[[Any], Any]:
    # A fresh function for every name: dynamo refuses one object under two names.
    return lambda original: lambda *_, **__: value


_TORCH_PATCHES = (
    _Patch("torch.cuda", "is_available", _returning(False), "CPU was asked for on a GPU machine"),
    _Patch(
        "torch.cuda", "device_count", _returning(1), "0 makes Megatron skip its process groups and seeding"
    ),
    _Patch("torch.cuda", "current_device", _returning(0), "passed on as a device argument"),
    _Patch("torch.cuda", "set_device synchronize", _returning(None), "no device to set or wait for"),
    _Patch("torch.cuda", "Stream", _always(FinishedStream), "side streams of dispatcher and optimizer"),
    _Patch("torch.cuda", "Event", _always(HostEvent), "timers and stream ordering"),
    _Patch("torch.cuda", "current_stream", _returning(FinishedStream()), "stream ordering"),
    _Patch("torch.cuda", "stream", _returning(contextlib.nullcontext()), "side streams"),
    _Patch("torch.cuda", "memory_stats", _returning(defaultdict(int)), "--log-memory-to-tensorboard"),
    _Patch(
        "torch.cuda",
        "get_device_properties",
        _returning(types.SimpleNamespace(major=0, minor=0, total_memory=0, name="cpu")),
        "argument checks of tensor and context parallelism",
    ),
    # The one CPU generator stands in for the CUDA generator.
    _Patch(
        "torch.cuda",
        "manual_seed",
        _always(lambda seed: torch.default_generator.manual_seed(seed)),
        "model-parallel seeding",
    ),
    _Patch(
        "torch.cuda",
        "get_rng_state",
        _always(lambda *_, **__: torch.get_rng_state()),
        "checkpoints, recompute",
    ),
    _Patch(
        "torch.cuda",
        "set_rng_state",
        _always(lambda state, *_, **__: torch.set_rng_state(state)),
        "checkpoints, recompute",
    ),
    _Patch(
        "torch.autograd.function:BackwardCFunction",
        "apply",
        inside_the_device_mode,
        "activation recompute runs forward code inside torch.autograd.backward",
    ),
    _Patch("torch.distributed", "barrier", without_device_ids, "an NCCL-only argument that gloo refuses"),
    _Patch("torch.distributed", "all_gather", uneven_all_gather, "expert tensor parallelism, see there"),
    _Patch("torch.distributed", "reduce_scatter", uneven_reduce_scatter, "expert tensor parallelism"),
)

_MEGATRON_PATCHES = (
    _Patch(
        "megatron.core.datasets.utils",
        "compile_helpers",
        find_dataset_helpers,
        "runs make, which the wheel cannot and a bare machine may not",
    ),
    _Patch(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        _always(lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)),
        "random state of dropout under recompute",
    ),
    _Patch(
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        _always(lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()),
        "random state of dropout under recompute",
    ),
    _Patch(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _always(move_to_host),
        "turns split sizes into numbers only when they are CUDA tensors; gloo wants numbers",
    ),
    _Patch(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm",
        "__new__",
        norm_under_sequence_parallelism,
        "sequence parallelism without Transformer Engine or Apex",
    ),
    _Patch(
        "megatron.training.training",
        "initialize_megatron",
        lambda original: functools.partial(original, allow_no_cuda=True),
        "pretrain() does not pass the flag on",
    ),
)
