"""Traffic on the busiest links, and its sums over devices and nodes.

Shape letters: D devices.
"""

from dataclasses import dataclass, fields

import numpy as np

from megatron_fssdp.planning.kernels import traffic_sums
from megatron_fssdp.planning.native.kernel import Kernel
from megatron_fssdp.planning.placement.topology import Topology

find_busiest = Kernel(traffic_sums.find_busiest)


@dataclass(frozen=True)
class BusiestLinks:
    """Number of units (tokens or experts) on the busiest link of each kind, in its busier direction.

    Attributes:
        near: Units between the busiest device and other devices of its node.
        far_of_device: Units between the busiest device and other nodes.
        far_of_node: Units between the busiest node and other nodes.
        far_of_mean_node: Units between an average node and other nodes.
    """

    near: float = 0.0
    far_of_device: float = 0.0
    far_of_node: float = 0.0
    far_of_mean_node: float = 0.0

    def times(self, number: int) -> "BusiestLinks":
        """A copy with all fields multiplied by ``number``."""
        return BusiestLinks(**{field.name: number * getattr(self, field.name) for field in fields(self)})


UNUSED = BusiestLinks()


@dataclass(frozen=True, eq=False)
class DispatchTraffic:
    """Traffic of one dispatch. Combine has the same traffic in the other direction.

    Attributes:
        tokens_D: (token, k) pairs that each device computes, int64 ``[D]``.
        busiest: (token, k) pairs on the busiest links.
        cross_node: Number of (token, k) pairs that are sent to another node.
    """

    tokens_D: np.ndarray
    busiest: BusiestLinks
    cross_node: int

    def times(self, number: int) -> "DispatchTraffic":
        """Traffic of ``number`` dispatches like this one."""
        return DispatchTraffic(number * self.tokens_D, self.busiest.times(number), number * self.cross_node)


def summed_traffic(sums: np.ndarray, topology: Topology) -> DispatchTraffic:
    """Traffic of a dispatch from the sums of every device.

    Args:
        sums: Own tokens of each device, tokens that it sends to and receives from other devices of its node,
            and tokens that it sends to and receives from other nodes, int64 ``[5, D]``.
        topology: Nodes of the devices.
    """
    found = np.empty((1, 5), np.int64)
    find_busiest(sums, topology.node_of_device_D, topology.num_nodes, found)
    _, near, far_of_device, far_of_node, far = found[0].tolist()
    busiest = BusiestLinks(float(near), float(far_of_device), float(far_of_node), far / topology.num_nodes)
    return DispatchTraffic(sums[0] + sums[2] + sums[4], busiest, far)
