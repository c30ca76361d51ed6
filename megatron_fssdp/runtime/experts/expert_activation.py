"""The non-linearity between an expert's two matrices, gated or plain.

Shape letters: T tokens, F FFN dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExpertActivation:
    """``activation(x + bias) * probs``, with every variation Megatron's config offers for MoE.

    Attributes:
        function: Element-wise function, e.g. ``torch.nn.functional.gelu``.
        gated: The input holds gate and linear half side by side.
        clamp: Bound on the gate from above and on the linear half from both sides.
        linear_offset: Added to the linear half.
        interleave: Width of alternating gate and linear blocks, ``None`` for two halves.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    gated: bool = False
    clamp: float | None = None
    linear_offset: float = 0.0
    interleave: int | None = None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, probs: torch.Tensor) -> torch.Tensor:
        """Activate and weight by the routing probability.

        Args:
            x: ``[T, F]``, or ``[T, 2F]`` when gated.
            bias: Broadcastable to ``x``, or ``None``.
            probs: ``[T]``, usually fp32.

        Returns:
            ``[T, F]`` in the dtype of ``x``.
        """
        if bias is not None:
            x = x + bias
        y = self._gated(x) if self.gated else self.function(x)
        return (y * probs.unsqueeze(-1)).to(y.dtype)

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        if self.interleave is not None:
            # Not reshape: it cannot work out a size for an expert without rows.
            x = x.unflatten(-1, (-1, 2, self.interleave)).transpose(-3, -2).flatten(-3)
        gate, linear = torch.chunk(x, 2, dim=-1)
        if self.clamp is not None:
            gate = gate.clamp(max=self.clamp)
            linear = linear.clamp(min=-self.clamp, max=self.clamp)
        return self.function(gate) * (linear + self.linear_offset)
