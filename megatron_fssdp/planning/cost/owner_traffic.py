"""Traffic of dispatches in which replicas serve only their own device, computed from what replicas change.

Without replicas all tokens go to the owners. A replica keeps its own device's tokens there. So the traffic of
any placement follows from the traffic without replicas and one number for each replica. No array has more
entries than the counts.

Shape letters: E experts, D devices, P pairs of expert and device.
"""

import numpy as np

from megatron_fssdp.planning.cost.dispatch_sums import DispatchTraffic, summed_traffic
from megatron_fssdp.planning.kernels import owner_sums
from megatron_fssdp.planning.native.kernel import Kernel
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology

find_busiest = Kernel(owner_sums.find_busiest)
keep_replicas_tokens = Kernel(owner_sums.keep_replicas_tokens)
sum_owner_tokens = Kernel(owner_sums.sum_owner_tokens)


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
        nodes = (topology.node_of_device_D, topology.by_node_D, topology.first_N)
        sum_owner_tokens(self._counts_DE, owner_E, *nodes, self._sums)

    def without_replicas(self) -> DispatchTraffic:
        """Traffic if all tokens go to the owners."""
        return self._traffic(self._sums)

    def of(self, placement: ExpertPlacement) -> DispatchTraffic:
        """Traffic if the tokens of a device with a replica stay there, and all others go to the owners.

        Args:
            placement: Owners, which are those of this object, and replicas.
        """
        expert_P, device_P = np.divmod(np.flatnonzero(placement.present_ED), placement.num_devices)
        is_replica_P = device_P != self._owner_E[expert_P]
        return self._traffic(self._with_replicas(expert_P[is_replica_P], device_P[is_replica_P]))

    def busiest(self, expert_P: np.ndarray, device_P: np.ndarray) -> np.ndarray:
        """The most loaded device and the busiest links, if the tokens of devices with replicas stay there.

        Args:
            expert_P: Expert of each replica, int64 ``[P]``.
            device_P: Device of each replica, int64 ``[P]``.

        Returns:
            Tokens that the most loaded device computes; tokens between the busiest device and its node,
            between the busiest device and other nodes, and between the busiest node and others; and all
            tokens between nodes. int64, five of them.
        """
        found, topology = np.zeros(5, np.int64), self._topology
        sums = self._with_replicas(expert_P, device_P)
        find_busiest(sums, topology.node_of_device_D, topology.num_nodes, found)
        return found

    def _with_replicas(self, expert_P: np.ndarray, device_P: np.ndarray) -> np.ndarray:
        sums = self._sums.copy()
        node_D = self._topology.node_of_device_D
        keep_replicas_tokens(self._counts_DE, self._owner_E, node_D, expert_P, device_P, sums)
        return sums

    def _traffic(self, sums: np.ndarray) -> DispatchTraffic:
        own_D, near_out_D, near_in_D, far_out_D, far_in_D = sums
        return summed_traffic(own_D, near_out_D, near_in_D, far_out_D, far_in_D, self._topology)
