"""What a placement is planned for: one layer's owners, loads and limits.

Shape letters: E experts, D devices, N nodes.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.loads.even_dispatch_model import EvenDispatchModel
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology


@dataclass(frozen=True, slots=True)
class LayerDemand:
    """What is planned for: one layer's owners and loads, and how many replicas are allowed.

    Attributes:
        owner_E: Owner of every expert.
        load_DE: Load by source and expert.
        node_load_NE: The same by source node.
        topology: Nodes of the devices.
        slots: Most replicas a device may hold.
        max_replicated: Most experts that may have replicas.
        mean: Mean device load.
        owners_max: Highest one of the owners alone.
        lower_bound: No placement's highest one is below.
        num_above_bound: Devices whose owned experts alone are above it.
    """

    owner_E: np.ndarray
    load_DE: np.ndarray
    node_load_NE: np.ndarray
    topology: Topology
    slots: int
    max_replicated: int
    mean: float
    owners_max: float
    lower_bound: float
    num_above_bound: int

    @classmethod
    def of(
        cls, owner_E: np.ndarray, load_DE: np.ndarray, topology: Topology, slots: int, max_replicated: int
    ) -> "LayerDemand":
        """With mean and maximum device load of the owners alone and a bound that no placement gets below.

        At most ``max_replicated`` owners give anything away, so the next most loaded one's load
        stays; and no maximum is below the mean.
        """
        node_load_NE = topology.sum_over_nodes(load_DE)
        num_devices = topology.num_devices
        load_D = np.bincount(owner_E, weights=node_load_NE.sum(axis=0), minlength=num_devices)
        mean = float(load_D.sum()) / num_devices
        stays = float(np.sort(load_D)[-1 - max_replicated]) if max_replicated < num_devices else 0.0
        lower_bound = max(mean, stays)
        return cls(
            owner_E,
            load_DE,
            node_load_NE,
            topology,
            slots,
            max_replicated,
            mean,
            float(load_D.max()),
            lower_bound,
            int(np.count_nonzero(load_D > lower_bound)),
        )

    @property
    def memory_is_enough(self) -> bool:
        """Whether every expert that may be replicated fits on every device: m == t in Hecate's Alg. 1."""
        return self.slots >= self.max_replicated

    def owners_only(self) -> ExpertPlacement:
        """The placement without replicas."""
        return ExpertPlacement.owners_only(self.owner_E, self.topology.num_devices)

    def placement_of(self, model: EvenDispatchModel) -> ExpertPlacement:
        """What a model with these owners has come to."""
        return ExpertPlacement(self.owner_E, model.present_ED(), slots=self.slots)

    def owners_model(self) -> EvenDispatchModel:
        """The owners alone."""
        return EvenDispatchModel(self.owner_E, self.load_DE, self.node_load_NE, self.topology)

    def model_of(self, placement: ExpertPlacement) -> EvenDispatchModel:
        """A placement with these owners."""
        model = self.owners_model()
        model.spread_like(placement)
        return model
