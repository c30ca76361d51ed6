"""The two hops of the deduplicated exchange: how many rows every rank sends to and receives from every other.

A token goes at most once to each node that computes one of its experts, and inside the node at most once to
each device. The first hop leads to the *relay* of the token's source in that node: the device with the same
number inside its node. The second hop leads from the relay to the devices of its node::

    source (node 0, second device)        relays: the second devices        devices of each node
    token t, experts on 4 devices    ──>  node 1  ───────────────────────>  its first and second device
                                     ──>  node 2  ───────────────────────>  its first and second device

Results return on the same way, and are summed where they meet: on the device, on the relay, at the source.

Shape letters: D devices, N nodes.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.placement.topology import Topology


@dataclass(frozen=True, eq=False)
class TwoHops:
    """Numbers of rows in both hops of one micro-batch, known to all ranks.

    Attributes:
        topology: Nodes of the devices.
        tokens_DN: Tokens of each source device that go to each node, however many of their experts are
            there; int64 ``[D, N]``.
        tokens_DD: Tokens of each source device (first axis) that go to each device, int64 ``[D, D]``.
    """

    topology: Topology
    tokens_DN: np.ndarray
    tokens_DD: np.ndarray

    @cached_property
    def relay_DN(self) -> np.ndarray:
        """The device of each node that receives the rows of each source, int64 ``[D, N]``.

        If a node has fewer devices than the source's node, several sources of a node share a relay.
        """
        relay_DN = np.empty((self.topology.num_devices, self.topology.num_nodes), np.int64)
        for members in self.topology.devices_by_node:
            for number, source in enumerate(members):
                relay_DN[source] = [own[number % len(own)] for own in self.topology.devices_by_node]
        return relay_DN

    @property
    def tokens_between_nodes(self) -> float:
        """Tokens that are sent to another node."""
        nodes = np.arange(self.topology.num_nodes)
        return float(self.tokens_DN[self.topology.node_of_device_D[:, None] != nodes].sum())

    def members(self, device: int) -> tuple[int, ...]:
        """The devices of a device's node, ascending."""
        return self.topology.devices_by_node[self.topology.node_of_device[device]]

    def sources(self, relay: int) -> np.ndarray:
        """Sources whose rows a relay receives, ascending."""
        return np.flatnonzero(self.relay_DN[:, self.topology.node_of_device[relay]] == relay)

    def first_hop(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows that a device sends to, and receives from, every device in the first hop, ``[D]`` each."""
        sends_D, receives_D = np.zeros((2, self.topology.num_devices), np.int64)
        sends_D[self.relay_DN[device]] = self.tokens_DN[device]
        sources = self.sources(device)
        receives_D[sources] = self.tokens_DN[sources, self.topology.node_of_device[device]]
        return sends_D, receives_D

    def second_hop(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows that a device sends to, and receives from, every device in the second hop, ``[D]`` each."""
        sends_D, receives_D = np.zeros((2, self.topology.num_devices), np.int64)
        members = list(self.members(device))
        sends_D[members] = self.tokens_DD[self.sources(device)][:, members].sum(axis=0)
        receives_D[members] = [self.tokens_DD[self.sources(relay), device].sum() for relay in members]
        return sends_D, receives_D
