"""How experts travel from all devices that have them to the devices that get them in addition."""

from collections.abc import Sequence
from functools import partial

from megatron_fssdp.planning.placement.topology import Topology


class TransferGrowth:
    """Builds the transfers that bring experts to more devices (:func:`additional_transfer` tells the rules).

    Attributes:
        found: The edges so far: (depth, whether inside a node, expert, source, destination).
    """

    def __init__(self, topology: Topology) -> None:
        self.found: list[tuple[int, bool, int, int, int]] = []
        self._node_of = topology.node_of_device
        # Messages of each device: those that it sends, and those that it receives from other nodes.
        self._messages = [0] * topology.num_devices
        # Messages that each node sends to other nodes.
        self._crossings = [0] * topology.num_nodes

    def add(self, expert: int, owner: int, holders: Sequence[int], added: Sequence[int]) -> None:
        """Add the edges that bring one expert from its holders to other devices.

        Args:
            expert: The expert.
            owner: Owner of the expert.
            holders: Devices that have the expert before.
            added: Devices that get the expert.
        """
        has, wants = self._by_node(holders), self._by_node(added)
        after_owner = partial(self._nodes_after, self._node_of[owner])
        starts = sorted(sorted(has, key=after_owner), key=self._crossings.__getitem__)
        chains = [(self._least_busy(has[node]), -1) for node in starts]
        for i, node in enumerate(sorted(wants.keys() - has.keys(), key=after_owner)):
            source, depth = chains[i % len(chains)]
            leader = self._least_busy(wants[node])
            self.found.append((depth + 1, False, expert, source, leader))
            self._crossings[self._node_of[source]] += 1
            self._messages[source] += 1
            self._messages[leader] += 1
            chains[i % len(chains)] = leader, depth + 1
            self._fill(expert, depth + 1, [leader], [device for device in wants[node] if device != leader])
        for node, devices in wants.items():
            if node in has:
                self._fill(expert, -1, sorted(has[node], key=self._messages.__getitem__), devices)

    def _fill(self, expert: int, depth: int, level: list[int], devices: list[int]) -> None:
        """Add the edges inside a node, level by level. Each device sends to at most two others.

        Args:
            expert: The expert.
            depth: Depth of the edges by which the devices of ``level`` got the expert; -1 if they had it
                before.
            level: Devices of the node that have the expert.
            devices: Devices of the node that get the expert.
        """
        while devices:
            depth += 1
            fed, devices = devices[: 2 * len(level)], devices[2 * len(level) :]
            for i, device in enumerate(fed):
                source = level[i % len(level)]
                self.found.append((depth, True, expert, source, device))
                self._messages[source] += 1
            level = fed

    def _by_node(self, devices: Sequence[int]) -> dict[int, list[int]]:
        """The devices of each node that has any: node -> devices."""
        members: dict[int, list[int]] = {}
        for device in devices:
            members.setdefault(self._node_of[device], []).append(device)
        return members

    def _nodes_after(self, first: int, node: int) -> int:
        """Distance of a node after the first one, in cyclic order of node numbers."""
        return (node - first) % len(self._crossings)

    def _least_busy(self, devices: list[int]) -> int:
        """The device with the fewest messages so far; the first one of equals."""
        return min(devices, key=self._messages.__getitem__)
