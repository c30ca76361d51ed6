"""The input of a placement search: one layer's owners, loads and limits.

Shape letters: E experts, D devices, N nodes.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.loads.even_dispatch_model import EvenDispatchModel
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology


@dataclass(frozen=True, slots=True)
class LayerDemand:
    """One layer's owners and loads, how many replicas are allowed, and bounds that follow from them.

    Loads are numbers of (token, k) pairs.

    Attributes:
        owner_E: Owner of every expert, int64 ``[E]``.
        load_DE: Load by source device and expert, float64 ``[D, E]``.
        node_load_NE: Load by source node and expert, float64 ``[N, E]``.
        topology: Nodes of the devices.
        slots: Most replicas that a device may hold.
        max_replicated: Most experts that may have replicas.
        mean: Mean device load. It is the same under every placement.
        owners_max: Highest device load without replicas.
        lower_bound: A bound for the highest device load: it is not lower under any placement.
        num_above_bound: Number of devices whose load without replicas is above ``lower_bound``.
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
        """Compute the mean load, the highest load without replicas, and the lower bound.

        The highest load is never lower than the mean load. And at most ``max_replicated`` owners can give
        load away, so the load of the next most loaded owner stays what it is. The lower bound is the larger
        of these two loads.

        Args:
            owner_E: Owner of every expert, int64 ``[E]``.
            load_DE: Load by source device and expert, float64 ``[D, E]``.
            topology: Nodes of the devices.
            slots: Most replicas that a device may hold.
            max_replicated: Most experts that may have replicas.
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
        """Whether each device has slots for all experts that may have replicas: m == t in Hecate's Alg. 1."""
        return self.slots >= self.max_replicated

    def owners_only(self) -> ExpertPlacement:
        """The placement without replicas."""
        return ExpertPlacement.owners_only(self.owner_E, self.topology.num_devices)

    def placement_of(self, model: EvenDispatchModel) -> ExpertPlacement:
        """The placement at which a model of device loads with these owners has arrived."""
        return ExpertPlacement(self.owner_E, model.present_ED(), slots=self.slots)

    def owners_model(self) -> EvenDispatchModel:
        """A model of device loads that starts without replicas."""
        return EvenDispatchModel(self.owner_E, self.load_DE, self.node_load_NE, self.topology)

    def model_of(self, placement: ExpertPlacement) -> EvenDispatchModel:
        """A model of device loads that starts from a placement with these owners."""
        model = self.owners_model()
        model.spread_like(placement)
        return model
