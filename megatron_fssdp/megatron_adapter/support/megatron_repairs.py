"""Repairs Megatron: its optimizer resumes from its own checkpoints, and helpers and log lines are found.

**Padded buckets.** The fully reshardable format of megatron-core 0.19 stores wrong numbers if a buffer has
several buckets and a bucket other than the last one is padded. Megatron removes the padding from the state,
and then cuts out each parameter's part by an offset that still counts the padding::

    buffer with padding      |  bucket 0  |pad|  bucket 1  |    offsets of bucket 1 count the pad
    state without padding    |  bucket 0  |  bucket 1  |        so they are too large by the pad

Megatron only warns of "data corruption".

**Torch's Adam**, Megatron's optimizer without Transformer Engine and Apex, keeps one ``step`` tensor for each
parameter; theirs keep one number for each parameter group. In megatron-core 0.19, the distributed optimizer:

* asks a new optimizer for its step, which has no state yet, and fails;
* gives one step tensor to all parameters, so that it increases once per parameter in every iteration;
* overwrites the loaded step by the one from before the load (default format), or misses it and fails (fully
  reshardable format), when it sets the state of a parameter;
* fails to write into fp32 parameters, which require a gradient.

The last two repairs change nothing for other optimizers.

**Log lines.** The package of Megatron's Muon logs by absl when it is imported. That configures logging, so
what Megatron-LM then asks for has no effect, and its lines at INFO are lost, as are the plugin's. They are
also lost where a host wants warnings only (verl), or configures nothing in Ray's workers.
"""

import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from typing import Any

import torch

from megatron_fssdp.megatron_adapter.wrapping import wrap


@cache  # once in a process
def install() -> None:
    """Repair Megatron, after the CPU runtime."""
    from megatron.core.datasets import utils
    from megatron.core.optimizer import distrib_optimizer

    utils.compile_helpers = compilation_if_needed(utils.compile_helpers)
    distributed = distrib_optimizer.DistributedOptimizer
    wrap(distributed, "sharded_param_state_fully_reshardable", _state_by_right_offsets)
    if not getattr(distrib_optimizer, "HAVE_APEX_OR_TE", True):
        wrap(distributed, "state_dict", _state_dict_with_a_step)
        wrap(distributed, "load_state_dict", _load_state_dict_with_own_steps)
        wrap(distributed, "_set_main_param_and_optimizer_states", _set_state_except_step)


def log_at_info(handler: Callable[[], logging.Handler]) -> None:
    """Log as Megatron-LM asks for, with a handler of its class, if absl has configured logging before."""
    root = logging.getLogger()
    is_plain = [type(present) for present in root.handlers] == [logging.StreamHandler]
    if is_plain and root.level == logging.WARNING and "absl.logging" in sys.modules:
        logging.basicConfig(handlers=[handler()], level=logging.INFO, force=True)


def log_in_quiet_hosts() -> None:
    """Let the plugin's lines at INFO be seen, unless the user has given its logger a level."""
    package = logging.getLogger("megatron_fssdp")
    if package.level == logging.NOTSET and not package.isEnabledFor(logging.INFO):
        package.setLevel(logging.INFO)
    if not package.hasHandlers():
        package.addHandler(logging.StreamHandler())


def _state_by_right_offsets(sharded_state: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as restore:
        for buffer in self.buffers:
            restore.callback(setattr, buffer, "param_index_map", buffer.param_index_map)
            buffer.param_index_map = _offsets_without_padding(buffer)
        return sharded_state(self, *args, **kwargs)


def _offsets_without_padding(buffer: Any) -> dict[torch.nn.Parameter, tuple[int, int, int]]:
    """Return begin, end and bucket of each parameter in a buffer without the padding of its buckets."""
    padding_before, padding = [], 0
    for bucket in buffer.buckets:
        padding_before.append(padding)
        padding += bucket.grad_data.numel() - bucket.numel_unpadded
    return {
        parameter: (begin - padding_before[bucket], end - padding_before[bucket], bucket)
        for parameter, (begin, end, bucket) in buffer.param_index_map.items()
    }


def _state_dict_with_a_step(state_dict: Any, self: Any) -> Any:
    if _is_repaired(self) and not self.optimizer.state:
        self.init_state_fn(self.optimizer, self.config)
        for parameter, state in self.optimizer.state.items():
            # With these states, Adam's first step begins, so nothing else changes.
            device = parameter.device if self.config.optimizer_cuda_graph else "cpu"
            state["step"] = torch.zeros((), device=device)
    return state_dict(self)


def _load_state_dict_with_own_steps(load_state_dict: Any, self: Any, loaded: Any) -> Any:
    result = load_state_dict(self, loaded)
    if _is_repaired(self):
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()
    return result


def _set_state_except_step(set_state: Any, self: Any, model_param: Any, tensors: Any) -> Any:
    if _is_repaired(self):
        # Megatron skips values that are not tensors. load_state_dict has set the step already.
        tensors = {**tensors, "step": None}
    with torch.no_grad():  # In fp32 the target is a view of the model's Parameter.
        return set_state(self, model_param, tensors)


def _is_repaired(optimizer: Any) -> bool:
    return isinstance(optimizer.optimizer, (torch.optim.Adam, torch.optim.AdamW))


def compilation_if_needed(original: Callable[[], None]) -> Callable[[], None]:
    """Return a function that does nothing if there are compiled helpers; otherwise the original.

    Every training asks rank 0 to run ``make``. The megatron-core wheel has the helpers, but no Makefile. A
    checkout has only a Makefile, which needs pybind11 and a compiler; the wheel's helpers work with it, too.
    """
    name = "megatron.core.datasets.helpers_cpp"
    with suppress(ImportError):
        importlib.import_module(name)
        return lambda: None
    with suppress(ImportError):  # not installed, or compiled for another Python
        for file in importlib.metadata.files("megatron-core") or ():
            if file.name.startswith("helpers_cpp.") and file.suffix == ".so":
                spec = importlib.util.spec_from_file_location(name, str(file.locate()))
                assert spec and spec.loader  # noqa: PT018  a file has both
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                sys.modules[name] = module
                return lambda: None
    return original
