"""The activations of the product under the names of the reference's."""

import torch
from torch.nn import functional

from megatron_fssdp.runtime.experts.expert_activation import ExpertActivation

from ..reference_layer import BLOCK, CLAMP, OFFSET

ACTIVATIONS = {
    "gelu": ExpertActivation(functional.gelu),
    "relu": ExpertActivation(functional.relu),
    "squared_relu": ExpertActivation(lambda x: functional.relu(x).square()),
    "swiglu": ExpertActivation(functional.silu, gated=True),
    "clamped_geglu": ExpertActivation(
        lambda x: x * torch.sigmoid(1.702 * x), gated=True, clamp=CLAMP, linear_offset=OFFSET
    ),
    "interleaved_swiglu": ExpertActivation(functional.silu, gated=True, interleave=BLOCK),
}
