"""Reads Megatron's expert modules: the Parameters of each expert, and the activation function."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu, weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from torch.nn import functional

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.runtime.experts.expert_activation import ExpertActivation
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters

Activation = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]


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


def expert_activation(experts: Any) -> Activation:
    """Return the activation function that Megatron's own expert module computes under its config.

    It uses Megatron's fused kernels if the config asks for them. Results then equal those of stock
    Megatron in bf16 too.

    Args:
        experts: Megatron's expert module, ``SequentialMLP`` or ``TEGroupedMLP``.
    """
    config = experts.config
    # Only TEGroupedMLP supports interleaved gates. SequentialMLP ignores the setting.
    interleave = None if hasattr(experts, "local_experts") else config.moe_mlp_glu_interleave_size
    plain = ExpertActivation(
        function=config.activation_func,
        gated=config.gated_linear_unit,
        clamp=config.activation_func_clamp_value,
        linear_offset=config.glu_linear_offset,
        interleave=interleave if config.gated_linear_unit else None,
    )
    if not (config.bias_activation_fusion and config.gated_linear_unit) or plain.interleave is not None:
        return plain
    if config.activation_func is functional.silu and config.activation_func_clamp_value is None:

        def swiglu(x: torch.Tensor, bias: torch.Tensor | None, probs: torch.Tensor) -> torch.Tensor:
            if bias is not None:  # Megatron's fused kernel does not accept a bias.
                return plain(x, bias, probs)
            return weighted_bias_swiglu_impl(
                x, None, probs.unsqueeze(-1), config.activation_func_fp8_input_store
            )

        return swiglu
    if config.activation_func is quick_gelu:

        def quick_geglu(x: torch.Tensor, bias: torch.Tensor | None, probs: torch.Tensor) -> torch.Tensor:
            return weighted_bias_quick_geglu_impl(
                x,
                bias,
                probs.unsqueeze(-1),
                config.activation_func_fp8_input_store,
                config.glu_linear_offset,
                config.activation_func_clamp_value,
            )

        return quick_geglu
    return plain
