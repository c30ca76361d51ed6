"""The two hops of the deduplicated exchange, against a count of single tokens."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fssdp.planning.dispatch.two_hops import TwoHops
from megatron_fssdp.planning.placement.topology import Topology


@settings(max_examples=50, deadline=None)
@given(
    nodes=st.lists(st.integers(0, 2), min_size=1, max_size=7),
    num_tokens=st.integers(0, 12),
    seed=st.integers(0, 1000),
)
def test_every_token_takes_both_hops_once(nodes: list[int], num_tokens: int, seed: int) -> None:
    """Nodes may have different sizes and their devices any order of ranks."""
    topology = Topology.from_labels(nodes)
    num_devices, num_nodes = topology.num_devices, topology.num_nodes
    rng = np.random.default_rng(seed)
    goes_DTD = rng.random((num_devices, num_tokens, num_devices)) < 0.3
    at_node = np.zeros((num_devices, num_tokens, num_nodes), bool)
    for device, node in enumerate(topology.node_of_device):
        at_node[:, :, node] |= goes_DTD[:, :, device]
    hops = TwoHops(topology, at_node.sum(axis=1), goes_DTD.sum(axis=1))
    first, second = np.zeros((2, num_devices, num_devices), np.int64)
    for source in range(num_devices):
        for token in range(num_tokens):
            for node in np.flatnonzero(at_node[source, token]):
                relay = hops.relay_DN[source, node]
                assert topology.node_of_device[relay] == node
                first[source, relay] += 1
                for device in topology.devices_by_node[node]:
                    second[relay, device] += goes_DTD[source, token, device]
    for device in range(num_devices):
        for hop, wanted in ((hops.first_hop(device), first), (hops.second_hop(device), second)):
            np.testing.assert_array_equal(hop[0], wanted[device])
            np.testing.assert_array_equal(hop[1], wanted[:, device])
