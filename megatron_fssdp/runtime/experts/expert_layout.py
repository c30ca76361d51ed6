"""How one expert's weights form one flat chunk of a sparse collective.

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
    """The tensors of one expert; biases are ``None`` without ``--add-bias-linear``.

    Attributes:
        fc1: ``[F, M]``, or ``[2F, M]`` with the gate's half first when gated.
        fc2: ``[M, F]``.
        fc1_bias: Like the first dimension of ``fc1``.
        fc2_bias: ``[M]``.
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
        """The inverse of :meth:`tensors`: weights, then both biases or none."""
        if len(tensors) not in (2, 4):
            raise ValueError(f"expert tensors: got {len(tensors)}, wanted 2 (weights) or 4 (with biases)")
        return ExpertWeights(*tensors)


@dataclass(frozen=True)
class ExpertLayout:
    """Shapes of one expert's tensors, the same for every expert of a layer."""

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> "ExpertLayout":
        """The layout of one expert's tensors.

        Raises:
            ValueError: The tensors differ in dtype, so no one chunk can carry them.
        """
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            raise ValueError(f"expert tensors: got dtypes {sorted(map(str, dtypes))}, wanted one")
        return ExpertLayout(tuple(tensor.shape for tensor in tensors), tensors[0].dtype)

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each tensor."""
        return [shape.numel() for shape in self.shapes]

    @property
    def numel(self) -> int:
        """Elements of one expert."""
        return sum(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of one expert's parameters."""
        return self.numel * self.dtype.itemsize

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One flat chunk ``[numel]`` holding copies of the tensors."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def unpack(self, chunk: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of a flat chunk in the tensors' shapes."""
        parts = torch.split(chunk, self.sizes)
        return tuple(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))
