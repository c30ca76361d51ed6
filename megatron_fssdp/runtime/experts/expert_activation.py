"""The activation function between an expert's two matrices, gated or plain.

Shape letters: T tokens, F FFN dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExpertActivation:
    """Computes ``activation(x + bias) * probs`` with every variation that Megatron's config has for MoE.

    Attributes:
        function: Element-wise function, e.g. ``torch.nn.functional.gelu``.
        gated: Whether the input consists of a gate half and a linear half.
        clamp: Upper bound of the gate half, and bound of the absolute value of the linear half; ``None`` for
            no bounds.
        linear_offset: Number to add to the linear half.
        interleave: Width of alternating gate and linear blocks; ``None`` if the input has two halves instead.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    gated: bool = False
    clamp: float | None = None
    linear_offset: float = 0.0
    interleave: int | None = None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, probs: torch.Tensor) -> torch.Tensor:
        """Apply the activation and multiply by the routing probabilities.

        Args:
            x: Output of the expert's first matrix, ``[T, F]``, or ``[T, 2F]`` if gated.
            bias: Bias that can be broadcast to ``x``; ``None`` for no bias.
            probs: Routing probability of each row, ``[T]``, usually fp32.

        Returns:
            ``[T, F]`` in the dtype of ``x``.
        """
        if bias is not None:
            x = x + bias
        y = self._gated(x) if self.gated else self.function(x)
        return (y * probs.unsqueeze(-1)).to(y.dtype)

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        if self.interleave is not None:
            # reshape is not possible here: for an expert without rows, it cannot infer a size.
            x = x.unflatten(-1, (-1, 2, self.interleave)).transpose(-3, -2).flatten(-3)
        gate, linear = torch.chunk(x, 2, dim=-1)
        if self.clamp is not None:
            gate = gate.clamp(max=self.clamp)
            linear = linear.clamp(min=-self.clamp, max=self.clamp)
        return self.function(gate) * (linear + self.linear_offset)
