"""Reads the Parameters of each expert from Megatron's expert modules."""

from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters


def expert_parameters(experts: Any, num_experts: int) -> list[ExpertParameters]:
    """Return the Parameters of each local expert, in the order of ``ExpertWeights``.

    The modules and their Parameters stay as Megatron registered them. Initial weights, optimizer groups
    and checkpoint keys therefore equal those of stock Megatron.

    Args:
        experts: Megatron's expert module, ``SequentialMLP`` or ``TEGroupedMLP``.
        num_experts: Number of local experts of the module.

    Raises:
        ConfigurationError: The module stores its weights in another way.
    """
    if hasattr(experts, "local_experts"):
        return [_of_linears(mlp.linear_fc1, mlp.linear_fc2, "") for mlp in experts.local_experts]
    if hasattr(experts, "linear_fc1") and hasattr(experts.linear_fc1, "weight0"):
        return [_of_linears(experts.linear_fc1, experts.linear_fc2, str(i)) for i in range(num_experts)]
    raise ConfigurationError(
        f"expert module: got {type(experts).__name__}, wanted SequentialMLP or TEGroupedMLP; "
        "build the layer from Megatron's local or Transformer Engine MoE specs"
    )


def _of_linears(fc1: Any, fc2: Any, index: str) -> ExpertParameters:
    names = (f"weight{index}", f"bias{index}")
    weights = (getattr(fc1, names[0]), getattr(fc2, names[0]))
    biases = (getattr(fc1, names[1], None), getattr(fc2, names[1], None))
    # Transformer Engine stores an empty tensor instead of a missing bias.
    return weights + tuple(bias for bias in biases if bias is not None and bias.numel() > 0)
