"""Optimizers of resident replicas: those that are refused, and the states with which they begin."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from megatron_fssdp.config.errors import ConfigurationError


class LayerWiseDistributedOptimizer:
    chained_optimizers = ()


def test_a_layer_wise_optimizer_is_refused() -> None:
    from megatron_fssdp.megatron_adapter.experts.resident_experts import ResidentExperts

    nothing: Any = None
    with pytest.raises(ConfigurationError, match="got Megatron's layer-wise optimizer"):
        ResidentExperts(nothing, 1, [], LayerWiseDistributedOptimizer(), nothing)


def weights_and_biases() -> SimpleNamespace:
    """Return an optimizer like Megatron's Muon: weights have a momentum, and Adam trains biases."""
    weight, bias = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2))
    groups = [
        {"params": [parameter], "is_expert_parallel": True, "wd_mult": weight_decay}
        for parameter, weight_decay in ((weight, 1.0), (bias, 0.0))
    ]
    inner = [torch.optim.SGD(groups[:1], lr=0.1, momentum=0.9), torch.optim.Adam(groups[1:])]
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=one) for one in inner])


def test_states_begin_like_those_of_parameters_with_equal_settings() -> None:
    from megatron_fssdp.megatron_adapter.experts.resident_experts import _start_states_like

    model, residents = weights_and_biases(), weights_and_biases()
    for member in model.chained_optimizers:
        for group in member.optimizer.param_groups:
            group["params"][0].grad = torch.ones_like(group["params"][0])
        member.optimizer.step()
    _start_states_like(model, residents)
    names = [
        {name for state in member.optimizer.state.values() for name in state}
        for member in residents.chained_optimizers
    ]
    assert names == [{"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}]
    adam = residents.chained_optimizers[1].optimizer
    state = adam.state[adam.param_groups[0]["params"][0]]
    assert float(state["step"]) == 1
    assert not state["exp_avg"].any()
