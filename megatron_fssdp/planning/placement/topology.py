"""The nodes of an expert-parallel group: which devices share fast links.

Shape letters: E experts, D devices, N nodes.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.placement.array_freezing import frozen_array


@dataclass(frozen=True)
class Topology:
    """Partition of the devices of an expert-parallel group into nodes.

    Attributes:
        node_of_device: Node number of every device, ordered by the device's rank in the group; ``[D]``. Nodes
            are numbered 0, 1, ..., and each node has at least one device.

    Raises:
        ValueError: There is no device, or a node number is missing.
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
                f"{len(used) - 1}; Topology.from_labels makes such numbers from arbitrary labels"
            )

    @classmethod
    def uniform(cls, num_devices: int, num_nodes: int) -> "Topology":
        """A topology of equal nodes, whose devices are contiguous in rank order.

        Args:
            num_devices: Number of devices, D.
            num_nodes: Number of nodes, N.

        Raises:
            ValueError: A number is not positive, or the nodes cannot be of equal size.
        """
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
        """A topology from one label for each device.

        Args:
            labels: Label of every device's node, such as a host name; ``[D]``. Devices with equal labels
                share a node. Nodes are numbered in the order in which their labels first appear.
        """
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
        """For each node, its devices in ascending order."""
        devices: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for device, node in enumerate(self.node_of_device):
            devices[node].append(device)
        return tuple(tuple(members) for members in devices)

    @cached_property
    def node_of_device_D(self) -> np.ndarray:
        """Node number of every device, int64 ``[D]``, read-only."""
        return frozen_array(self.node_of_device, np.int64)

    @cached_property
    def by_node_D(self) -> np.ndarray:
        """The devices by node, then number, int64 ``[D]``, read-only."""
        return frozen_array(np.argsort(self.node_of_device_D, kind="stable"), np.int64)

    @cached_property
    def place_D(self) -> np.ndarray:
        """Position of every device in ``by_node_D``, int64 ``[D]``, read-only."""
        return frozen_array(np.argsort(self.by_node_D), np.int64)

    @cached_property
    def first_N(self) -> np.ndarray:
        """Where the devices of each node begin in ``by_node_D``, then D; int64 ``[N + 1]``, read-only."""
        return frozen_array([0, *np.cumsum(np.bincount(self.node_of_device_D))], np.int64)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``node_of_device_D``, ``by_node_D`` and ``first_N``, as kernels take them."""
        return self.node_of_device_D, self.by_node_D, self.first_N

    @cached_property
    def smallest_and_largest_node(self) -> tuple[int, int]:
        """Number of devices of the smallest and of the largest node."""
        sizes = np.bincount(self.node_of_device_D)
        return int(sizes.min()), int(sizes.max())

    @cached_property
    def _devices_per_node_if_even(self) -> int:
        """Number of devices of a node if nodes are equal and contiguous in rank order, otherwise 0."""
        size = self.num_devices // self.num_nodes
        contiguous = all(node == device // size for device, node in enumerate(self.node_of_device))
        return size if contiguous and size * self.num_nodes == self.num_devices else 0

    def sum_over_nodes(self, values_DE: np.ndarray) -> np.ndarray:
        """Sum the rows of each node's devices, in ascending device order.

        Args:
            values_DE: Values by device and expert, ``[D, E]``.

        Returns:
            Sums by node and expert, ``[N, E]``, of the same data type.
        """
        size = self._devices_per_node_if_even
        if size == 1:
            return np.array(values_DE)
        if size:
            # numpy adds row after row in C order. In another order it may add in pairs, and sums would
            # differ.
            values = np.ascontiguousarray(values_DE)
            return np.add.reduce(values.reshape(self.num_nodes, size, values.shape[1]), axis=1)
        return np.stack([values_DE[list(devices)].sum(axis=0) for devices in self.devices_by_node])
