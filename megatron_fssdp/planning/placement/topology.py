"""Which devices of one expert-parallel group share a node.

Shape letters: T tokens, M model dim, F ffn dim, E experts, D devices, N nodes, L layers.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.placement.array_freezing import frozen_array


@dataclass(frozen=True)
class Topology:
    """A partition of the group's devices into nodes.

    Attributes:
        node_of_device: Node number of every device, by its rank in the group. The nodes
            are numbered 0, 1, ... and each has at least one device.
    """

    node_of_device: tuple[int, ...]

    def __post_init__(self) -> None:
        nodes = tuple(int(node) for node in self.node_of_device)
        object.__setattr__(self, "node_of_device", nodes)
        if not nodes:
            raise ValueError(
                "node_of_device is empty: got 0 devices, wanted at least 1; give the node of every device"
            )
        used = sorted(set(nodes))
        if used != list(range(len(used))):
            raise ValueError(
                f"node_of_device uses the node numbers {used}, wanted every number from 0 to "
                f"{len(used) - 1}; Topology.from_labels numbers arbitrary labels that way"
            )

    @classmethod
    def uniform(cls, num_devices: int, num_nodes: int) -> "Topology":
        """Nodes of equal size, contiguous in rank order."""
        if num_devices < 1 or num_nodes < 1:
            raise ValueError(
                f"a topology needs at least one device and one node: got {num_devices} devices and "
                f"{num_nodes} nodes"
            )
        if num_devices % num_nodes:
            raise ValueError(
                f"{num_devices} devices cannot form {num_nodes} equal nodes: wanted a number of nodes that "
                f"divides {num_devices}; use Topology.from_labels for nodes of different sizes"
            )
        devices_per_node = num_devices // num_nodes
        return cls(tuple(device // devices_per_node for device in range(num_devices)))

    @classmethod
    def from_labels(cls, labels: Sequence[Hashable]) -> "Topology":
        """Nodes from one label a device, such as its host name, numbered by first appearance."""
        number_of: dict[Hashable, int] = {}
        return cls(tuple(number_of.setdefault(label, len(number_of)) for label in labels))

    @property
    def num_devices(self) -> int:
        """Number of devices, D."""
        return len(self.node_of_device)

    @cached_property
    def num_nodes(self) -> int:
        """Number of nodes, N."""
        return max(self.node_of_device) + 1

    @cached_property
    def devices_by_node(self) -> tuple[tuple[int, ...], ...]:
        """The devices of every node, ascending."""
        devices: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for device, node in enumerate(self.node_of_device):
            devices[node].append(device)
        return tuple(tuple(members) for members in devices)

    @cached_property
    def node_of_device_D(self) -> np.ndarray:
        """Node number of every device as a read-only int64 array [D]."""
        return frozen_array(self.node_of_device, np.int64)

    @cached_property
    def _devices_per_node_if_even(self) -> int:
        """Devices per node when nodes are equal and contiguous in rank order, else 0."""
        size = self.num_devices // self.num_nodes
        contiguous = all(node == device // size for device, node in enumerate(self.node_of_device))
        return size if contiguous and size * self.num_nodes == self.num_devices else 0

    def sum_over_nodes(self, values_DE: np.ndarray) -> np.ndarray:
        """Sums each node's rows, in ascending device order: [D, E] -> [N, E]."""
        size = self._devices_per_node_if_even
        if size == 1:
            return np.array(values_DE)
        if size:
            # In C order numpy adds row after row, in others it may add in pairs.
            values = np.ascontiguousarray(values_DE)
            return np.add.reduce(values.reshape(self.num_nodes, size, values.shape[1]), axis=1)
        return np.stack([values_DE[list(devices)].sum(axis=0) for devices in self.devices_by_node])
