"""Replacements for the few functions of Megatron that fail on the CPU."""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch


def move_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the tensor, which is on the host already; the signature is Megatron's."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def norm_under_sequence_parallelism(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a constructor of torch's norms that accepts sequence parallelism.

    Megatron refuses it, although only the attribute ``sequence_parallel`` of their parameters is missing, by
    which it sums the gradients over the tensor-parallel ranks.
    """

    def build(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        sequence_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = original(cls, config, hidden_size, eps, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel
        return norm

    return build


def attention_of_other_widths(original: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of Megatron's attention that accepts the widths of multi-latent attention.

    The class computes with any width, but takes that of its result from the config, as for ordinary heads.
    """

    @functools.wraps(original)
    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        k_channels, v_channels = kwargs.pop("k_channels", None), kwargs.pop("v_channels", None)
        original(self, config, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels
        if k_channels is not None:
            self.hidden_size_per_attention_head = k_channels

    return build


def find_dataset_helpers(original: Callable[[], None]) -> Callable[[], None]:
    """Return a function that uses existing compiled dataset helpers, and compiles only if there are none.

    The megatron-core wheel contains the compiled helpers, which work with a Megatron-LM checkout too. The
    checkout has only a Makefile, which needs pybind11 and a compiler.
    """
    name = "megatron.core.datasets.helpers_cpp"
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
        return lambda: None
    for file in importlib.metadata.files("megatron-core") or ():
        if file.name.startswith("helpers_cpp.") and file.suffix == ".so":
            spec = importlib.util.spec_from_file_location(name, str(file.locate()))
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[name] = module
            return lambda: None
    return original
