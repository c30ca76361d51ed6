"""The experts of one layer whose Parameters are on this rank."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ParametersByExpert


@dataclass(frozen=True, eq=False)
class LocalExperts:
    """The Parameters of the experts of one layer on this rank.

    The Parameters of an expert have the order of :class:`ExpertWeights`. Megatron registered those of owned
    experts; this class only refers to them.

    Attributes:
        what: Name of the layer in error messages.
        parameters: Parameters of the experts that this rank owns, ascending by expert.
        residents: Parameters of this rank's resident replicas, by expert.
        told_layout: Shapes of one expert's tensors, needed on a rank that owns no expert.
        await_parameters: Function that returns when the Parameters have the values of the last optimizer
            step. Whoever reads their contents in a forward pass calls it first. Megatron's distributed
            optimizer can gather Parameters as late as in the forward pass that needs them.
        told_device: Device of the tensors of a rank that owns no expert.
    """

    what: str
    parameters: ParametersByExpert
    residents: ParametersByExpert = field(default_factory=dict)
    told_layout: ExpertLayout | None = None
    await_parameters: Callable[[], object] = lambda: None
    told_device: torch.device | None = None

    def layout(self) -> ExpertLayout:
        """Shapes of one expert's tensors.

        Raises:
            ValueError: The experts have several layouts, or there is no expert and no ``told_layout``.
        """
        # The layout is not cached, because a model can be converted to another dtype after it is built.
        layouts = {ExpertLayout.of(tensors) for tensors in self.parameters.values()}
        if self.told_layout is not None:
            layouts.add(self.told_layout)
        if len(layouts) != 1:
            raise ValueError(
                f"{self.what}: got {len(layouts)} expert layouts {sorted(map(str, layouts))}, wanted one for "
                "all experts; on a rank that owns no expert, pass the layout argument"
            )
        return layouts.pop()

    @property
    def all_parameters(self) -> ParametersByExpert:
        """Parameters of owned experts and of resident replicas, by expert."""
        return {**self.parameters, **self.residents}

    @property
    def device(self) -> torch.device:
        """Device of the experts' tensors."""
        first = next(iter(self.parameters.values()), None)
        if first is not None:
            return first[0].device
        return self.told_device or torch.device("cpu")
