"""The few places where Megatron's own code needs a CPU meaning."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch


def move_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What is on the host already; Megatron's signature."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def norm_under_sequence_parallelism(original: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's norms refuse sequence parallelism; they only lack the mark.

    With the mark on their parameters, Megatron's finalize step sums their
    gradients over the tensor-parallel ranks as it does for its own norms.
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


def find_dataset_helpers(original: Callable[[], None]) -> Callable[[], None]:
    """Use compiled dataset helpers that exist already; compile only without any.

    The wheel ships them without a Makefile. A Megatron-LM checkout has the Makefile
    but wants pybind11 and a compiler; the installed wheel's serve it as well.
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
