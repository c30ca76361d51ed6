"""Runs Megatron on CPU ranks over gloo, for laptops, tests and CI.

Megatron assumes CUDA in many places. :class:`.CpuDeviceMode` replaces CUDA device arguments of all torch
functions by the CPU, and :data:`_PATCHES` lists the attributes that are replaced, each with its reason.
``torch.cuda.is_available()`` stays or becomes ``False``, because ``True`` breaks dynamo and ``torch.optim``.
"""

import functools
import os
import types
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

import torch

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.megatron_adapter.cpu import cpu_replacements as replacements
from megatron_fssdp.megatron_adapter.support.megatron_repairs import compilation_if_needed
from megatron_fssdp.megatron_adapter.wrapping import wrapped

DEVICE_VARIABLE = "MEGATRON_FSSDP_DEVICE"

_installed = False


def requested() -> bool:
    """Whether Megatron should run on the CPU: without an accelerator, or by ``MEGATRON_FSSDP_DEVICE=cpu``.

    Raises:
        ConfigurationError: The variable names an unknown device, or one that this machine does not have.
    """
    asked = os.environ.get(DEVICE_VARIABLE, "").lower()
    if asked not in ("", "cpu", "cuda"):
        raise ConfigurationError(
            f"environment variable {DEVICE_VARIABLE}: got {asked!r}, wanted 'cpu' or 'cuda'; "
            "unset it to detect the device"
        )
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            f"environment variable {DEVICE_VARIABLE}: got 'cuda', but torch finds no CUDA device; wanted "
            "'cpu', or a machine with GPUs: megatron-fssdp doctor says what is missing"
        )
    return asked == "cpu" or (asked == "" and not torch.cuda.is_available())


def install() -> bool:
    """Apply the CPU patches once if the CPU is requested, and return whether they are active."""
    global _installed
    if not requested():
        return False
    if not _installed:
        _installed = True
        # With tensor or context parallelism, Megatron's argument check wants this variable. It orders
        # CUDA's work queues and has no effect on the CPU.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        # The mode stays active until the process ends.
        replacements.CpuDeviceMode().__enter__()
        for target, replacements_of in _PATCHES.items():
            if target.startswith("megatron.training") and find_spec("megatron.training") is None:
                continue  # Hosts with loops of their own do not need it.
            owner = resolve_name(target if ":" in target else f"{target}:")
            for name, replacement in replacements_of.items():
                original = getattr(owner, name, None) if name in _MAY_BE_MISSING else getattr(owner, name)
                setattr(owner, name, replacement(original))
    return True


def check_arguments(args: Any) -> None:
    """Refuse, by a ConfigurationError, parsed arguments that ask for context parallelism on the CPU."""
    if _installed and (args.context_parallel_size or 1) > 1:
        raise ConfigurationError(
            f"--context-parallel-size: got {args.context_parallel_size} on the CPU, wanted 1, because "
            "Megatron's context parallelism uses Transformer Engine's attention, which needs a GPU; use "
            "--tensor-model-parallel-size 2 --sequence-parallel to split sequences, or run on GPUs"
        )


def _around(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    return functools.partial(wrapped, replacement)


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _returning(value: Any) -> Callable[[Any], Any]:
    # Every name gets a new function, because dynamo refuses one function object under two names.
    return lambda original: lambda *_, **__: value


_PROPERTIES = types.SimpleNamespace(major=0, minor=0, total_memory=0, name="cpu")

# Modules and classes; their replaced attributes, with functions from original to replacement, and reasons.
# Those of torch come first, because Megatron's modules are imported when they are patched.
_PATCHES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "torch.cuda": {
        "is_available": _returning(False),  # the CPU may be requested on a GPU machine
        "device_count": _returning(1),  # with 0 devices Megatron skips its process groups and seeding
        "current_device": _returning(0),  # Megatron passes it on as a device argument
        "set_device": _returning(None),  # there is no device to set
        "synchronize": _returning(None),  # or to wait for
        "is_current_stream_capturing": _returning(False),  # router traces ask in every pass
        "Stream": _always(replacements.FinishedStream),  # dispatcher and optimizer make side streams
        "Event": _always(replacements.HostEvent),  # timers and the ordering of streams use events
        "current_stream": _returning(replacements.FinishedStream()),  # streams wait for each other
        "stream": _returning(nullcontext()),  # code runs inside side streams
        "memory_stats": _returning(defaultdict(int)),  # --log-memory-to-tensorboard uses it
        "get_device_properties": _returning(_PROPERTIES),  # the checks of parallel sizes read it
        # The CPU's one random generator replaces the CUDA generator, which Megatron seeds, and which
        # checkpoints and recompute save and restore.
        "manual_seed": _always(lambda seed: torch.default_generator.manual_seed(seed)),
        "get_rng_state": _always(lambda *_, **__: torch.get_rng_state()),
        "set_rng_state": _always(lambda state, *_, **__: torch.set_rng_state(state)),
    },
    # The combined schedule names the streams that use a tensor.
    "torch:Tensor": {"record_stream": _returning(None)},
    # Recompute runs forward code inside torch.autograd.backward.
    "torch.autograd": {"_engine_run_backward": _around(replacements.inside_the_device_mode)},
    "torch.distributed": {
        "barrier": _around(replacements.without_device_ids),  # gloo refuses an argument of NCCL
        "all_gather_into_tensor": _around(replacements.all_gather_in_one_hop),  # gloo needs D - 1 hops
        "all_to_all_single": _around(replacements.all_to_all_at_once),  # 1.1 times as fast on shared links
        "all_gather": _around(replacements.uneven_all_gather),  # gloo refuses different sizes
        "reduce_scatter": _around(replacements.uneven_reduce_scatter),  # likewise
    },
    "megatron.core.datasets.utils": {"compile_helpers": compilation_if_needed},  # also without the plugin
    "megatron.core.tensor_parallel.random": {
        # Dropout under recompute saves and restores the random state.
        "_set_cuda_rng_state": _always(lambda state, *_, **__: torch.set_rng_state(state)),
        "_get_cuda_rng_state": _always(lambda *_, **__: torch.get_rng_state()),
        # Recomputed activations of experts use these names also without fp8.
        "FP8GlobalStateManager": _always(types.SimpleNamespace(is_fp8_enabled=lambda: False)),
        "activation_recompute_forward": _returning(nullcontext()),
        "fp8_autocast": _returning(nullcontext()),
    },
    "megatron.core.transformer.moe.token_dispatcher": {
        "maybe_move_tensor_to_cpu": _always(replacements.move_to_host)  # it expects CUDA tensors
    },
    # Without it, 8 experts on 4 expert-parallel ranks are two, four times each.
    "megatron.core.transformer.moe.experts:SequentialMLP": {
        "__init__": _around(replacements.experts_of_this_rank)
    },
    "megatron.core.transformer.moe.experts:TEGroupedMLP": {
        "__init__": _around(replacements.experts_of_this_rank)
    },
    "megatron.core.transformer.torch_norm:WrappedTorchNorm": {
        "__new__": _around(replacements.norm_under_sequence_parallelism)
    },
    "megatron.core.transformer.dot_product_attention:DotProductAttention": {
        "__init__": _around(replacements.attention_of_other_widths)  # for multi-latent attention
    },
    "megatron.training.training": {
        # pretrain() does not pass allow_no_cuda on.
        "initialize_megatron": lambda original: functools.partial(original, allow_no_cuda=True),
        # A loader draws a number from the CPU's generator, after a checkpoint was loaded. Dropout, which has
        # CUDA's generator on a GPU, would then not go on as in an uninterrupted run.
        "build_train_valid_test_data_iterators": torch.random.fork_rng(devices=()),
    },
}
# Megatron imports these names with Transformer Engine only.
_MAY_BE_MISSING = ("FP8GlobalStateManager", "activation_recompute_forward", "fp8_autocast")
