"""Which devices share fast links, and in which order groups of devices exchange rows.

Shape letters: E experts, D devices, N nodes.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps

import numpy as np

from megatron_fssdp.planning.arrays import frozen_array


@dataclass(frozen=True)
class Topology:
    """Partition of an expert-parallel group into nodes; ``node_of_device`` has their numbers from 0 on.

    Raises:
        ValueError: There is no device, or a node number is missing.
    """

    node_of_device: tuple[int, ...]

    def __post_init__(self) -> None:
        nodes = tuple(int(node) for node in self.node_of_device)
        object.__setattr__(self, "node_of_device", nodes)
        used = sorted(set(nodes))
        if not nodes or used != list(range(len(used))):
            raise ValueError(
                f"topology: got {len(nodes)} devices with the node numbers {used}, wanted one device or "
                "more, and every number from 0 on; Topology.from_labels makes such numbers from any labels"
            )

    @classmethod
    def uniform(cls, num_devices: int, num_nodes: int) -> "Topology":
        """A topology of N nodes of contiguous ranks, which are equal if N divides the devices."""
        return cls(tuple(device * num_nodes // num_devices for device in range(num_devices)))

    @classmethod
    def from_labels(cls, labels: Sequence[Hashable]) -> "Topology":
        """A topology from the label of each device's node, such as a host name."""
        number_of = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        return cls(tuple(number_of[label] for label in labels))

    @property
    def num_devices(self) -> int:
        """Number of devices, D."""
        return len(self.node_of_device)

    @cached_property
    def num_nodes(self) -> int:
        """Number of nodes, N."""
        return max(self.node_of_device) + 1

    @cached_property
    def node_of_device_D(self) -> np.ndarray:
        """Node number of every device, int64 ``[D]``, read-only."""
        return frozen_array(self.node_of_device, np.int64)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For kernels: the node of each device, the devices by node, and where each node begins there."""
        by_node_D = np.argsort(self.node_of_device_D, kind="stable")
        first_N = [0, *np.cumsum(np.bincount(self.node_of_device_D))]
        return self.node_of_device_D, frozen_array(by_node_D, np.int64), frozen_array(first_N, np.int64)

    @cached_property
    def devices_by_node(self) -> tuple[tuple[int, ...], ...]:
        """For each node, its devices in ascending order."""
        _, by_node_D, first_N = self.arrays
        return tuple(tuple(devices.tolist()) for devices in np.split(by_node_D, first_N[1:-1]))

    @cached_property
    def smallest_and_largest_node(self) -> tuple[int, int]:
        """Numbers of devices of the smallest and of the largest node."""
        sizes = [len(devices) for devices in self.devices_by_node]
        return min(sizes), max(sizes)

    @cached_property
    def _is_uniform(self) -> bool:
        return self.node_of_device == tuple(
            np.repeat(range(self.num_nodes), self.num_devices // self.num_nodes)
        )

    def sum_over_nodes(self, values_DE: np.ndarray) -> np.ndarray:
        """Sums of the rows of each node's devices, in ascending device order: ``[D, E]`` to ``[N, E]``."""
        if not self._is_uniform:
            return np.stack([values_DE[list(devices)].sum(axis=0) for devices in self.devices_by_node])
        # numpy adds row after row in C order. In another order it may add in pairs, and sums would differ.
        rows = np.ascontiguousarray(values_DE).reshape(self.num_nodes, -1, values_DE.shape[1])
        return rows.sum(axis=1)


def kept_on[Keeper, Result](
    build: Callable[[Keeper, Topology], Result],
) -> Callable[[Keeper, Topology], Result]:
    """Keep a function's last result on its first argument, a frozen object, for the same topology."""

    @wraps(build)
    def kept(keeper: Keeper, topology: Topology) -> Result:
        known: tuple[Topology, Result] | None = keeper.__dict__.get(build.__qualname__)
        if known is None or known[0] is not topology:
            known = keeper.__dict__[build.__qualname__] = (topology, build(keeper, topology))
        return known[1]

    return kept


@dataclass(frozen=True)
class GroupRing:
    """The exchange partners of one rank, step by step, under the smart schedule (FasterMoE, §4.2).

    Consecutive ranks, ``num_ranks`` in all, form groups of equal size, and the groups form a ring. In each
    step ``rank`` sends rows to one group and receives rows from one; its own group has the last step if
    ``own_last``, and otherwise the first one. All ranks need the same value.

    Raises:
        ValueError: The group size does not divide the number of ranks.
    """

    rank: int
    num_ranks: int
    group_size: int
    own_last: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.num_ranks % self.group_size:
            raise ValueError(
                f"group_size is {self.group_size}: wanted a divisor of the {self.num_ranks} expert-parallel "
                "ranks; set another group size"
            )

    @classmethod
    def of(cls, rank: int, topology: Topology, group_size: int | None = None) -> "GroupRing":
        """The ring of a rank. By default, groups are the nodes, or single ranks for unequal nodes or one."""
        if group_size is None:
            smallest, largest = topology.smallest_and_largest_node
            group_size = smallest if smallest == largest and topology.num_nodes > 1 else 1
        return cls(rank, topology.num_devices, group_size)

    @property
    def num_steps(self) -> int:
        """Number of groups, and so of exchange steps; the paper's n."""
        return self.num_ranks // self.group_size

    def receivers(self, step: int) -> range:
        """The ranks to which this rank sends rows: group ``own − k``."""
        return self._group(-step - self.own_last)

    def senders(self, step: int) -> range:
        """The ranks whose rows this rank computes: group ``own + k``, k steps after the own group's."""
        return self._group(step + self.own_last)

    def _group(self, distance: int) -> range:
        first = (self.rank // self.group_size + distance) % self.num_steps * self.group_size
        return range(first, first + self.group_size)
