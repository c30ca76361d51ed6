"""Traffic of dispatches in which replicas serve only their own device, computed from what replicas change.

Without replicas all tokens go to the owners. A replica keeps its own device's tokens there. So the traffic of
any placement follows from the traffic without replicas and one number for each replica. No array has more
entries than the counts.

Shape letters: E experts, D devices, P pairs of expert and device.
"""

import numpy as np

from megatron_fssdp.planning.cost.dispatch_sums import DispatchTraffic, summed_traffic
from megatron_fssdp.planning.kernels import traffic_sums
from megatron_fssdp.planning.native.kernel import Kernel
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.replica_sets import ReplicaSets
from megatron_fssdp.planning.placement.topology import Topology

busiest_of_cases = Kernel(traffic_sums.busiest_of_cases)
keep_replicas_tokens = Kernel(traffic_sums.keep_replicas_tokens)
sum_owner_tokens = Kernel(traffic_sums.sum_owner_tokens)


class OwnerTraffic:
    """Traffic of one layer's counts under given owners and any replicas.

    Args:
        counts_DE: (token, k) pairs by source device and expert, integers ``[D, E]``.
        owner_E: Owner of every expert, int64 ``[E]``.
        topology: Nodes of the devices.
    """

    def __init__(self, counts_DE: np.ndarray, owner_E: np.ndarray, topology: Topology) -> None:
        self._counts_DE = np.ascontiguousarray(counts_DE, np.int64)
        self._owner_E, self._topology = owner_E, topology
        self._sums = np.zeros((5, topology.num_devices), np.int64)
        sum_owner_tokens(self._counts_DE, owner_E, *topology.arrays, self._sums)

    def without_replicas(self) -> DispatchTraffic:
        """Traffic if all tokens go to the owners."""
        return summed_traffic(self._sums, self._topology)

    def of(self, placement: ExpertPlacement) -> DispatchTraffic:
        """Traffic if the tokens of a device with a replica stay there, and all others go to the owners.

        Args:
            placement: Owners, which are those of this object, and replicas.
        """
        expert_P, device_P = np.divmod(np.flatnonzero(placement.present_ED), placement.num_devices)
        is_replica_P = device_P != self._owner_E[expert_P]
        replicas = expert_P[is_replica_P], device_P[is_replica_P]
        sums, node_D = self._sums.copy(), self._topology.node_of_device_D
        keep_replicas_tokens(self._counts_DE, self._owner_E, node_D, *replicas, sums)
        return summed_traffic(sums, self._topology)

    def busiest(self, replicas: ReplicaSets) -> np.ndarray:
        """The most loaded device and the busiest links, if the tokens of devices with replicas stay there.

        Args:
            replicas: Replicas of several placements.

        Returns:
            A row for each placement: tokens that the most loaded device computes; tokens between the busiest
            device and its node, between the busiest device and other nodes, and between the busiest node and
            others; and all tokens between nodes. int64, five in a row.
        """
        topology = self._topology
        found = np.empty((len(replicas.ends), 5), np.int64)
        busiest_of_cases(
            self._counts_DE,
            self._owner_E,
            topology.node_of_device_D,
            topology.num_nodes,
            replicas.expert_P,
            replicas.device_P,
            replicas.ends,
            self._sums,
            np.empty_like(self._sums),
            np.empty(self._counts_DE.shape[::-1], np.int64),
            found,
        )
        return found
