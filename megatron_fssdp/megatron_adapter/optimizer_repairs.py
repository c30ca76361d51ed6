"""Lets Megatron's distributed optimizer resume with torch's Adam.

Without Transformer Engine and Apex, Megatron's optimizer is torch's Adam, on a GPU as on
the CPU. It keeps one ``step`` tensor per parameter where their Adams keep one number per
parameter group. The distributed optimizer (megatron-core 0.19) misses that in four places,
so that a resume fails or, worse, goes on from wrong state:

* it asks a fresh optimizer, which has no state yet, for its step, and fails;
* it gives one step tensor to all parameters; Adam advances every parameter's step in
  place, so that the shared one advances once per parameter and iteration;
* its default format puts the step of before the load over the one that was loaded;
* its fully reshardable format stores no step per parameter and then fails to find it.

The default format also fails to write into fp32 parameters, which require a gradient.

Three methods are wrapped, once. An optimizer that is not torch's Adam passes through them
unchanged. So does everything but a checkpoint: no method of a training step is touched.
"""

from functools import wraps
from typing import Any

import torch

_installed = False


def install() -> None:
    """Repair the distributed optimizer if Megatron uses torch's Adam; idempotent."""
    global _installed
    from megatron.core.optimizer import distrib_optimizer

    if _installed or getattr(distrib_optimizer, "HAVE_APEX_OR_TE", True):
        return
    _installed = True
    distributed = distrib_optimizer.DistributedOptimizer
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
