"""Lets Megatron's distributed optimizer resume from what it saved.

Its fully reshardable format (megatron-core 0.19) stores wrong numbers where a buffer has several
buckets and one that is not the last is padded: it takes the padding out of the state and then
cuts the parameters' parts out by offsets that count it. Megatron only warns of "data corruption".

And without Transformer Engine and Apex, Megatron's optimizer is torch's Adam, on a GPU as on
the CPU. It keeps one ``step`` tensor per parameter where their Adams keep one number per
parameter group. The distributed optimizer misses that in four places, so that a resume fails
or, worse, goes on from wrong state:

* it asks a fresh optimizer, which has no state yet, for its step, and fails;
* it gives one step tensor to all parameters; Adam advances every parameter's step in
  place, so that the shared one advances once per parameter and iteration;
* its default format puts the step of before the load over the one that was loaded;
* its fully reshardable format stores no step per parameter and then fails to find it.

The default format also fails to write into fp32 parameters, which require a gradient.

The methods are wrapped once. An optimizer that is not torch's Adam passes through the last three
unchanged. So does everything but a checkpoint: no method of a training step is touched.
"""

from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch

_installed = False

Offsets = dict[torch.nn.Parameter, tuple[int, int, int]]


def install() -> None:
    """Repair the distributed optimizer; idempotent."""
    global _installed
    from megatron.core.optimizer import distrib_optimizer

    if _installed:
        return
    _installed = True
    _repair_offsets(distrib_optimizer.DistributedOptimizer)
    if not getattr(distrib_optimizer, "HAVE_APEX_OR_TE", True):
        _repair_torch_adam(distrib_optimizer.DistributedOptimizer)


def _repair_offsets(distributed: Any) -> None:
    sharded_state = distributed.sharded_param_state_fully_reshardable

    @wraps(sharded_state)
    def sharded_state_by_right_offsets(self: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as restore:
            for buffer in self.buffers:
                restore.callback(setattr, buffer, "param_index_map", buffer.param_index_map)
                buffer.param_index_map = _offsets_without_padding(buffer)
            return sharded_state(self, *args, **kwargs)

    distributed.sharded_param_state_fully_reshardable = sharded_state_by_right_offsets


def _offsets_without_padding(buffer: Any) -> Offsets:
    """Begin, end and bucket of each parameter when the padding at the buckets' ends is left out."""
    padding_before, padding = [], 0
    for bucket in buffer.buckets:
        padding_before.append(padding)
        padding += bucket.grad_data.numel() - bucket.numel_unpadded
    return {
        parameter: (begin - padding_before[bucket], end - padding_before[bucket], bucket)
        for parameter, (begin, end, bucket) in buffer.param_index_map.items()
    }


def _repair_torch_adam(distributed: Any) -> None:
    state_dict = distributed.state_dict
    load_state_dict = distributed.load_state_dict
    set_state = distributed._set_main_param_and_optimizer_states

    @wraps(state_dict)
    def state_dict_with_a_step(self: Any) -> Any:
        if _is_repaired(self):
            _start_empty_state(self.optimizer)
        return state_dict(self)

    @wraps(load_state_dict)
    def load_state_dict_with_own_steps(self: Any, loaded: Any) -> Any:
        result = load_state_dict(self, loaded)
        if _is_repaired(self):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()
        return result

    @wraps(set_state)
    def set_state_except_step(self: Any, model_param: Any, tensors: Any) -> Any:
        if _is_repaired(self):
            # Megatron passes over what is no tensor; load_state_dict has set the step.
            tensors = {**tensors, "step": None}
        with torch.no_grad():  # in fp32 the target is a view of the model's own Parameter
            return set_state(self, model_param, tensors)

    distributed.state_dict = state_dict_with_a_step
    distributed.load_state_dict = load_state_dict_with_own_steps
    distributed._set_main_param_and_optimizer_states = set_state_except_step


def _is_repaired(optimizer: Any) -> bool:
    return isinstance(optimizer.optimizer, (torch.optim.Adam, torch.optim.AdamW))


def _start_empty_state(adam: torch.optim.Optimizer) -> None:
    """What Adam's own first step starts from, so that a run that loads nothing stays the same."""
    if adam.state:
        return
    for group in adam.param_groups:
        for parameter in group["params"]:
            on_device = group["capturable"] or group["fused"]
            adam.state[parameter] = {
                "step": torch.zeros(
                    (), dtype=torch.float32, device=parameter.device if on_device else torch.device("cpu")
                ),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
