"""An MoE layer without any distributed logic: the global batch on one rank, in fp64.

Shape letters: T tokens of all ranks, M model dim, F ffn dim, E experts.
"""

import torch
from torch.nn import functional


def draw_weights(seed, num_experts, model_dim, ffn_dim):
    """fc1 ``[F, M]`` and fc2 ``[M, F]`` of every expert, fp64."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.5
            for shape in ((ffn_dim, model_dim), (model_dim, ffn_dim))
        ]
        for _ in range(num_experts)
    ]


def reference_forward(hidden, probs, routing_map, weights):
    """``[T, M]``: for every token the sum over its experts of probability times FFN.

    Hidden states are ``[T, M]``, probabilities and routing map ``[T, E]``. Only entries in the map count.
    """
    fc1_E, fc2_E = (torch.stack(tensors) for tensors in zip(*weights, strict=True))
    outputs_ETM = functional.gelu(hidden @ fc1_E.mT) @ fc2_E.mT
    return torch.einsum("te,etm->tm", torch.where(routing_map, probs, 0.0), outputs_ETM)
