"""The experts of one layer whose Parameters are on this rank."""

from dataclasses import dataclass, field

import numpy as np

from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, ParametersByExpert


@dataclass(frozen=True, eq=False)
class LocalExperts:
    """Parameters by expert, in the order of :class:`ExpertWeights`. The tensors stay Megatron's own.

    Attributes:
        what: The layer, for messages.
        parameters: ParametersByExpert of the experts that this rank owns, ascending by expert.
        residents: ParametersByExpert of this rank's resident replicas, by expert.
        told_layout: Shapes of one expert's tensors, for a rank that owns none.
    """

    what: str
    parameters: ParametersByExpert
    residents: ParametersByExpert = field(default_factory=dict)
    told_layout: ExpertLayout | None = None

    def check_owned(self, owner_E: np.ndarray, device: int) -> None:
        """Raise unless the owned ones are those that a device owns.

        Raises:
            ValueError: They are not, or their shapes differ.
        """
        owned = tuple(np.flatnonzero(owner_E == device).tolist())
        if tuple(self.parameters) != owned:
            raise ValueError(
                f"{self.what}: got parameters of experts {tuple(self.parameters)}, "
                f"wanted those this rank owns, {owned}"
            )
        self.layout()

    def check_present(self, placement: ExpertPlacement, device: int) -> None:
        """Raise unless these are the experts that have Parameters on a device.

        Raises:
            ValueError: They are not.
        """
        here = placement.experts_on(device)
        if sorted(self.all_parameters) != list(here):
            raise ValueError(
                f"{self.what}: got parameters of experts {sorted(self.parameters)} and of "
                f"replicas {sorted(self.residents)}, wanted those of the experts that are here, {list(here)}"
            )

    def layout(self) -> ExpertLayout:
        """Shapes of one expert's tensors.

        Raises:
            ValueError: There are several, or none.
        """
        # Asked anew each time: a model may be converted to another dtype after it is built.
        layouts = {ExpertLayout.of(tensors) for tensors in self.parameters.values()}
        if self.told_layout is not None:
            layouts.add(self.told_layout)
        if len(layouts) != 1:
            raise ValueError(
                f"{self.what}: got {len(layouts)} expert layouts "
                f"{sorted(map(str, layouts))}, wanted one for all experts; a rank that owns none of them "
                "needs the layout argument"
            )
        return layouts.pop()

    @property
    def all_parameters(self) -> ParametersByExpert:
        """Parameters of owned experts and of resident replicas, by expert."""
        return {**self.parameters, **self.residents}
