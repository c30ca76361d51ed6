"""A rank's experts, and the layout of one expert in the flat tensor that the sparse collectives move.

Shape letters: M model dimension, F FFN dimension.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import torch

ExpertParameters = Sequence[torch.nn.Parameter]
"""The Parameters of one expert: the weights of both matrices, and with ``--add-bias-linear`` their biases.

They are ``[F, M]``, ``[M, F]``, ``[F]`` and ``[M]``. If gated, the first matrix and its bias have 2F rows,
with the gate's half first. Those of adapters come before, if all others are frozen.
"""

ParametersByExpert = Mapping[int, ExpertParameters]
"""The Parameters of several experts of a layer, by expert."""


@dataclass(frozen=True)
class ExpertLayout:
    """Shapes, in the order of :data:`ExpertParameters`, and data type of each expert's tensors in a layer.

    The first ``num_trained`` tensors have gradients. The others are frozen in all experts of the layer.
    """

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    num_trained: int

    @staticmethod
    def of(tensors: Sequence[torch.Tensor], num_trained: int | None = None) -> "ExpertLayout":
        """The layout of one expert's tensors, which must have one dtype to fit into one flat tensor.

        By default, all tensors are trained.
        """
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            raise ValueError(
                f"expert tensors: got dtypes {sorted(map(str, dtypes))}, wanted one dtype for all tensors of "
                "an expert"
            )
        shapes = tuple(tensor.shape for tensor in tensors)
        return ExpertLayout(shapes, tensors[0].dtype, len(shapes) if num_trained is None else num_trained)

    @cached_property
    def sizes(self) -> list[int]:
        """Number of elements of each tensor."""
        return [shape.numel() for shape in self.shapes]

    @cached_property
    def numel(self) -> int:
        """Number of elements of one expert."""
        return sum(self.sizes)

    @cached_property
    def trained_numel(self) -> int:
        """Number of elements of one expert that have gradients."""
        return sum(self.sizes[: self.num_trained])

    @property
    def num_bytes(self) -> int:
        """Bytes of one expert's parameters."""
        return self.numel * self.dtype.itemsize

    def unpack(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of a flat tensor with the shapes of the expert's tensors, or of those that are trained.

        It has ``numel`` or ``trained_numel`` elements.
        """
        number = len(self.sizes) if flat.numel() == self.numel else self.num_trained
        parts = torch.split(flat, self.sizes[:number])
        return tuple(part.view(shape) for part, shape in zip(parts, self.shapes[:number], strict=True))


@dataclass(frozen=True, eq=False)
class LocalExperts:
    """The Parameters of the experts of one layer on this rank.

    Megatron registered those of owned experts; this class only refers to them. A rank that owns no expert
    must be ``told`` the layout and the device.
    """

    name: str  # name of the layer in error messages
    parameters: ParametersByExpert  # of the experts that this rank owns, ascending
    residents: ParametersByExpert = field(default_factory=dict)  # of this rank's resident replicas
    told: tuple[ExpertLayout, torch.device] | None = None
    num_trained: int | None = None  # of an expert's Parameters, the first ones; None if all are
    # Returns when the Parameters have the values of the last optimizer step. Whoever reads them in a forward
    # pass calls it first: Megatron's distributed optimizer may gather Parameters as late as there.
    await_parameters: Callable[[], object] = lambda: None
    # Orders the current stream behind all that autograd, perhaps on another one, has added to gradients of
    # owned experts. Whoever reads or adds to these gradients in a backward pass calls it first.
    await_gradients: Callable[[], object] = lambda: None

    def layout(self) -> ExpertLayout:
        """Shapes of one expert's tensors.

        Raises:
            ValueError: The experts have several layouts, or there is no expert and none was told.
        """
        # The layout is not cached, because a model can be converted to another dtype after it is built.
        layouts = {ExpertLayout.of(tensors, self.num_trained) for tensors in self.parameters.values()}
        if self.told is not None:
            layouts.add(self.told[0])
        if len(layouts) != 1:
            raise ValueError(
                f"{self.name}: got {len(layouts)} expert layouts {sorted(map(str, layouts))}, wanted one for "
                "all experts; on a rank that owns no expert, pass the layout argument"
            )
        return layouts.pop()

    @property
    def all_parameters(self) -> ParametersByExpert:
        """Parameters of owned experts and of resident replicas."""
        return {**self.parameters, **self.residents}

    @property
    def device(self) -> torch.device:
        """Device of the experts' tensors."""
        first = next(chain.from_iterable(self.parameters.values()), None)
        if first is None:
            return torch.device("cpu") if self.told is None else self.told[1]
        return first.device
