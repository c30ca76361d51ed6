"""Traffic on the busiest links, and its sums over devices and nodes.

Shape letters: D devices.
"""

from dataclasses import dataclass, fields

import numpy as np

from megatron_fssdp.planning.placement.topology import Topology


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


def summed_traffic(
    own_D: np.ndarray,
    near_out_D: np.ndarray,
    near_in_D: np.ndarray,
    far_out_D: np.ndarray,
    far_in_D: np.ndarray,
    topology: Topology,
) -> DispatchTraffic:
    """Traffic of a dispatch from the tokens of every device, which are whole numbers of any type.

    Args:
        own_D: Own tokens that each device computes, ``[D]``.
        near_out_D: Tokens that each device sends to other devices of its node, ``[D]``.
        near_in_D: Tokens that each device receives from other devices of its node, ``[D]``.
        far_out_D: Tokens that each device sends to other nodes, ``[D]``.
        far_in_D: Tokens that each device receives from other nodes, ``[D]``.
        topology: Nodes of the devices.
    """
    node_D = topology.node_of_device_D
    of_node = max(
        np.bincount(node_D, weights=far_out_D).max(),
        np.bincount(node_D, weights=far_in_D).max(),
    )
    busiest = BusiestLinks(
        near=float(max(near_out_D.max(), near_in_D.max())),
        far_of_device=float(max(far_out_D.max(), far_in_D.max())),
        far_of_node=float(of_node),
        far_of_mean_node=float(far_out_D.sum()) / topology.num_nodes,
    )
    tokens_D = np.rint(own_D + near_in_D + far_in_D).astype(np.int64)
    return DispatchTraffic(tokens_D, busiest, int(far_out_D.sum()))
