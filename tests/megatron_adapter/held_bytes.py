"""Bytes of Parameters and of what optimizers keep for them."""

import torch


def state_bytes(optimizer, parameters):
    """Bytes that this rank's optimizer keeps for Parameters, beside them."""
    kept = [state for p in parameters for state in _optimizer_states(optimizer, p)]
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return num_bytes([state for state in kept if state.untyped_storage().data_ptr() not in storages])


def _optimizer_states(optimizer, parameter):
    """The master weight, which can be the Parameter itself, and after a step states of its size."""
    states = []
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(member, "model_param_gbuf_map"):
            if parameter in member.model_param_gbuf_map:
                states = [*member._get_main_param_and_optimizer_states(parameter).values()]
        else:
            master = getattr(parameter, "main_param", parameter)
            if any(master is known for known in member.get_parameters()):
                states = [master, *member.optimizer.state.get(master, {}).values()]
    return [state.data for state in states if torch.is_tensor(state) and state.dim()]


def num_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
