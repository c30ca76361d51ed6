"""The layout of one expert's tensors in the flat tensor that the sparse collectives move.

Shape letters: M model dimension, F FFN dimension.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

ExpertParameters = Sequence[torch.nn.Parameter]
"""The Parameters of one expert, in the order of :class:`ExpertWeights`."""

ParametersByExpert = Mapping[int, ExpertParameters]
"""The Parameters of several experts of a layer, by expert."""


@dataclass(frozen=True)
class ExpertWeights:
    """The tensors of one expert.

    Attributes:
        fc1: Weights of the first matrix, ``[F, M]``, or ``[2F, M]`` with the gate's half first if gated.
        fc2: Weights of the second matrix, ``[M, F]``.
        fc1_bias: Bias of the first matrix, ``[F]`` or ``[2F]``; ``None`` without ``--add-bias-linear``.
        fc2_bias: Bias of the second matrix, ``[M]``; ``None`` without ``--add-bias-linear``.
    """

    fc1: torch.Tensor
    fc2: torch.Tensor
    fc1_bias: torch.Tensor | None = None
    fc2_bias: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in the order of :class:`ExpertLayout`."""
        return tuple(t for t in (self.fc1, self.fc2, self.fc1_bias, self.fc2_bias) if t is not None)

    @staticmethod
    def from_tensors(tensors: Sequence[torch.Tensor]) -> "ExpertWeights":
        """The inverse of :meth:`tensors`; takes the two weights, then both biases or none.

        Raises:
            ValueError: There are neither 2 nor 4 tensors.
        """
        if len(tensors) not in (2, 4):
            raise ValueError(f"expert tensors: got {len(tensors)}, wanted 2 (weights) or 4 (with biases)")
        return ExpertWeights(*tensors)


@dataclass(frozen=True)
class ExpertLayout:
    """Shapes and data type of one expert's tensors, equal for all experts of a layer.

    Attributes:
        shapes: Shape of each tensor, in the order of :meth:`ExpertWeights.tensors`.
        dtype: Data type of all tensors.
    """

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> "ExpertLayout":
        """The layout of one expert's tensors.

        Raises:
            ValueError: The tensors differ in dtype, so one flat tensor cannot hold them.
        """
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            raise ValueError(
                f"expert tensors: got dtypes {sorted(map(str, dtypes))}, wanted one dtype for all tensors of "
                "an expert"
            )
        return ExpertLayout(tuple(tensor.shape for tensor in tensors), tensors[0].dtype)

    @cached_property
    def sizes(self) -> list[int]:
        """Number of elements of each tensor."""
        return [shape.numel() for shape in self.shapes]

    @cached_property
    def numel(self) -> int:
        """Number of elements of one expert."""
        return sum(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of one expert's parameters."""
        return self.numel * self.dtype.itemsize

    def pack(self, tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the tensors of one expert into a flat tensor ``[numel]``, by default a new one."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors], out=out)

    def unpack(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of a flat tensor ``[numel]`` with the shapes of the expert's tensors."""
        parts = torch.split(flat, self.sizes)
        return tuple(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))
