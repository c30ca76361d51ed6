"""Traffic of dispatches in which replicas serve only their own device, computed from what replicas change.

Without replicas all tokens go to the owners. A replica keeps its own device's tokens there. So the traffic of
any placement follows from the traffic without replicas and one number for each replica. No array has more
entries than the counts.

Shape letters: E experts, D devices, P pairs of expert and device.
"""

import numpy as np

from megatron_fssdp.planning.cost.dispatch_sums import DispatchTraffic, summed_traffic
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology


class OwnerTraffic:
    """Traffic of one layer's counts under given owners and any replicas.

    Args:
        counts_DE: (token, k) pairs by source device and expert, integers ``[D, E]``.
        owner_E: Owner of every expert, int64 ``[E]``.
        topology: Nodes of the devices.
    """

    def __init__(self, counts_DE: np.ndarray, owner_E: np.ndarray, topology: Topology) -> None:
        self._counts_DE, self._owner_E, self._topology = counts_DE, owner_E, topology
        num_devices, num_experts = counts_DE.shape
        experts, load_E = np.arange(num_experts), counts_DE.sum(axis=0)
        self._node_E = topology.node_of_device_D[owner_E]
        own_E = counts_DE[owner_E, experts]
        # Of the counts, only those between an expert and the devices of its owner's node stay in a node.
        first_E, end_E = topology.first_N[self._node_E], topology.first_N[self._node_E + 1]
        size_E = end_E - first_E
        expert_P = np.repeat(experts, size_E)
        place_P = np.arange(expert_P.size) + np.repeat(first_E - (np.cumsum(size_E) - size_E), size_E)
        device_P = topology.by_node_D[place_P]
        tokens_P = counts_DE[device_P, expert_P]
        of_node_E = np.bincount(expert_P, weights=tokens_P, minlength=num_experts)
        in_node_D = np.bincount(device_P, weights=tokens_P, minlength=num_devices)
        self._own_D = np.bincount(owner_E, weights=own_E, minlength=num_devices)
        self._near_out_D = in_node_D - self._own_D
        self._near_in_D = np.bincount(owner_E, weights=of_node_E - own_E, minlength=num_devices)
        self._far_out_D = counts_DE.sum(axis=1) - in_node_D
        self._far_in_D = np.bincount(owner_E, weights=load_E - of_node_E, minlength=num_devices)

    def without_replicas(self) -> DispatchTraffic:
        """Traffic if all tokens go to the owners."""
        return summed_traffic(
            self._own_D,
            self._near_out_D,
            self._near_in_D,
            self._far_out_D,
            self._far_in_D,
            self._topology,
        )

    def of(self, placement: ExpertPlacement) -> DispatchTraffic:
        """Traffic if the tokens of a device with a replica stay there, and all others go to the owners.

        Args:
            placement: Owners, which are those of this object, and replicas.
        """
        if not placement.num_replicas:
            return self.without_replicas()
        node_D, num_devices = self._topology.node_of_device_D, self._topology.num_devices
        expert_P, device_P = np.nonzero(placement.present_ED)
        is_replica_P = device_P != self._owner_E[expert_P]
        expert_P, device_P = expert_P[is_replica_P], device_P[is_replica_P]
        owner_P, tokens_P = self._owner_E[expert_P], self._counts_DE[device_P, expert_P]
        near_P = np.where(node_D[device_P] == self._node_E[expert_P], tokens_P, 0)
        stay_D, near_out_D, near_in_D, in_D = (
            np.bincount(at_P, weights=values_P, minlength=num_devices)
            for at_P, values_P in (
                (device_P, tokens_P),
                (device_P, near_P),
                (owner_P, near_P),
                (owner_P, tokens_P),
            )
        )
        return summed_traffic(
            self._own_D + stay_D,
            self._near_out_D - near_out_D,
            self._near_in_D - near_in_D,
            self._far_out_D - (stay_D - near_out_D),
            self._far_in_D - (in_D - near_in_D),
            self._topology,
        )
