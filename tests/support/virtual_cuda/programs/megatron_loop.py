"""Lets Megatron's own training loop run on a virtual CUDA device.

The virtual device replaces what Megatron asks of ``torch.cuda`` and of NCCL. This module lists what else
Megatron cannot do without a GPU, and by what it is replaced. The patches with which the plugin trains on CPU
ranks (``megatron_adapter/cpu``) stay inactive: Megatron and the plugin take their CUDA branches.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from megatron_fssdp.megatron_adapter.cpu.cpu_megatron import (
    find_dataset_helpers,
    norm_under_sequence_parallelism,
)
from tests.support.virtual_cuda.books.virtual_device import VirtualDevice
from tests.support.virtual_cuda.posing.patches import Patches
from tests.support.virtual_cuda.session import virtual_cuda

_CPU_RUNTIME = "megatron_fssdp.megatron_adapter.cpu.cpu_runtime"


@dataclass(frozen=True)
class Replacement:
    """Something that Megatron cannot do without a GPU, and what does it instead.

    Attributes:
        what: What is replaced.
        by: What replaces it.
        reason: Why it is replaced.
        target: ``package.module`` or ``package.module:Class`` whose attributes are replaced. It is empty if
            something else than this module replaces it.
        names: Names of the replaced attributes, separated by spaces.
        make: Function from the original attribute to its replacement.
    """

    what: str
    by: str
    reason: str
    target: str = ""
    names: str = ""
    make: Callable[[Any], Any] | None = None

    def apply(self, patches: Patches) -> None:
        """Replace the attributes, if there are any."""
        if self.make is None:
            return
        module, _, attribute = self.target.partition(":")
        owner = importlib.import_module(module)
        owner = getattr(owner, attribute) if attribute else owner
        patches.put(owner, {name: self.make(getattr(owner, name)) for name in self.names.split()})


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _get_state(*_: Any, **__: Any) -> Any:
    return torch.default_generator.get_state()


def _set_state(new_state: Any, *_: Any, **__: Any) -> None:
    torch.default_generator.set_state(new_state)


def _inside_the_device_modes(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs in a thread of its own; modes are active only in the thread that entered them."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _modes_of_main_thread[-1]:
            return original(*args, **kwargs)

    return run


_modes_of_main_thread: list[Any] = []

DEVICE_REPLACEMENTS = (
    Replacement("streams and events", "books of the virtual device", "their order is what is checked"),
    Replacement("NCCL and its options", "gloo, in the order of issue", "NCCL needs GPUs"),
    Replacement("CUDA's random generators", "the generator of the CPU", "operators run on the CPU"),
    Replacement(
        "memory statistics and properties of the device",
        "bytes of the virtual device's tensors, capability 9.0",
        "there is no allocator of CUDA and no driver",
    ),
    Replacement("NVTX ranges and the CUDA profiler", "nothing", "there is no profiler that reads them"),
    Replacement("page-locked memory", "ordinary memory that is marked", "a driver has to lock it"),
)
"""What the virtual device itself replaces, for every program."""

MEGATRON_REPLACEMENTS = (
    Replacement(
        "random states in torch.cuda.random",
        "states of the CPU's generator",
        "Megatron's checkpoints and recompute save and restore them",
        "torch.cuda.random",
        "get_rng_state",
        _always(_get_state),
    ),
    Replacement(
        "restored random states in torch.cuda.random",
        "states of the CPU's generator",
        "Megatron's checkpoints and recompute save and restore them",
        "torch.cuda.random",
        "set_rng_state",
        _always(_set_state),
    ),
    Replacement(
        "Megatron's access to the CUDA generator",
        "states of the CPU's generator",
        "it uses functions of torch.cuda that it looked up when it was imported",
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        _always(_get_state),
    ),
    Replacement(
        "Megatron's changes of the CUDA generator",
        "states of the CPU's generator",
        "it uses functions of torch.cuda that it looked up when it was imported",
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        _always(_set_state),
    ),
    Replacement(
        "compilation of the data set helpers",
        "the compiled helpers of the installed megatron-core",
        "it needs a Makefile, pybind11 and a compiler, as on a machine without a GPU",
        "megatron.core.datasets.utils",
        "compile_helpers",
        find_dataset_helpers,
    ),
    Replacement(
        "fused norms of Transformer Engine or Apex under sequence parallelism",
        "torch's norms, whose parameters get the attribute sequence_parallel",
        "both packages need a GPU, and Megatron refuses torch's norms there",
        "megatron.core.transformer.torch_norm:WrappedTorchNorm",
        "__new__",
        norm_under_sequence_parallelism,
    ),
    Replacement(
        "the data loader's thread for page-locked memory",
        "the same thread, inside the modes of the virtual device",
        "torch's modes are active only in the thread that entered them",
        "torch.utils.data._utils.pin_memory",
        "_pin_memory_loop",
        _inside_the_device_modes,
    ),
)
"""What this module replaces in Megatron and in torch, for Megatron."""

COMPILER_REPLACEMENT = Replacement(
    "functions that Megatron compiles by torch.compile (its jit fuser)",
    "the same functions without compilation (stance force_eager)",
    "they would be compiled for the CPU, and the virtual device would not see their operators",
)

MEGATRON_ARGUMENTS = {
    "--transformer-impl local": "Transformer Engine's layers need a GPU; layers of torch run",
    "--no-gradient-accumulation-fusion": "the fused kernel is part of Apex and Transformer Engine",
    "--no-masked-softmax-fusion": "the fused kernel is part of Apex; torch's softmax runs",
    "--no-persist-layer-norm": "the fused kernel is part of Apex; torch's norm runs",
    "--no-rope-fusion": "the fused kernel is part of Transformer Engine; torch's operators run",
    "--no-bias-gelu-fusion": "compiled code would hide its operators; torch's operators run",
    "--no-bias-dropout-fusion": "compiled code would hide its operators; torch's operators run",
    "--no-bias-swiglu-fusion": "compiled code would hide its operators; torch's operators run",
}
"""Arguments of Megatron without its fused kernels, with the reason of each. Do not give
``--use-cpu-initialization``: with it, Megatron leaves the parameters on the CPU on a GPU too, if
``--use-distributed-optimizer`` does not move them."""


@contextmanager
def megatron_on_virtual_cuda(**options: Any) -> Iterator[VirtualDevice]:
    """Give this process a virtual CUDA device on which Megatron can train.

    The process group and Megatron's modules may exist before.

    Args:
        **options: Options of :func:`virtual_cuda`.

    Yields:
        The device, with its findings, host synchronizations and log.

    Raises:
        RuntimeError: The plugin's patches for CPU ranks are active in this process.
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
            for replacement in MEGATRON_REPLACEMENTS:
                replacement.apply(patches)
            with torch.compiler.set_stance("force_eager"):
                yield device
        finally:
            _modes_of_main_thread.pop()


def described_replacements() -> str:
    """The table of everything that is replaced, as Markdown."""
    rows = [*DEVICE_REPLACEMENTS, *MEGATRON_REPLACEMENTS, COMPILER_REPLACEMENT]
    lines = ["| replaced | by | why |", "|---|---|---|"]
    lines += [f"| {row.what} | {row.by} | {row.reason} |" for row in rows]
    lines += ["", "| argument of Megatron | why |", "|---|---|"]
    lines += [f"| `{argument}` | {reason} |" for argument, reason in MEGATRON_ARGUMENTS.items()]
    return "\n".join(lines)
