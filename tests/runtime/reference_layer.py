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
    output = torch.zeros_like(hidden)
    for expert, (fc1, fc2) in enumerate(weights):
        y = functional.gelu(hidden @ fc1.T) @ fc2.T
        chosen, prob = routing_map[:, expert].unsqueeze(1), probs[:, expert].unsqueeze(1)
        output = output + torch.where(chosen, prob * y, 0.0)
    return output
