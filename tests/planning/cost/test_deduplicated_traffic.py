from dataclasses import astuple
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fssdp.planning.cost.deduplicated_traffic import (
    TokenChoices,
    TwoHops,
    expected_hops,
    hops_traffic,
    tokens_per_pair,
)
from megatron_fssdp.planning.dispatch.token_dispatch import plan_dispatch
from megatron_fssdp.planning.placement.placement import ExpertPlacement, even_owners
from megatron_fssdp.planning.placement.topology import Topology
from tests.planning.placement_cases import pairs_traffic
from tests.support.random_placement import with_replicas


@settings(max_examples=50, deadline=None)
@given(
    nodes=st.lists(st.integers(0, 2), min_size=1, max_size=7),
    num_tokens=st.integers(0, 12),
    seed=st.integers(0, 1000),
)
def test_every_token_takes_both_hops_once(nodes, num_tokens, seed):
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


EXPERTS, DEVICES, NODES = 16, 8, 4
TOPOLOGY = Topology.uniform(DEVICES, NODES)
OWNERS = ExpertPlacement.owners_only(even_owners(EXPERTS, DEVICES), DEVICES)


@pytest.mark.parametrize("replicates", [False, True])
@pytest.mark.parametrize("top_k", [2, 4, 8])
def test_the_estimate_is_near_drawn_tokens(top_k, replicates):
    """Tokens draw their experts one after another, with log-normal popularity."""
    rng = np.random.default_rng(top_k)
    placement = OWNERS
    if replicates:
        pairs = [(e, int(d)) for e in (0, 5, 9) for d in rng.choice(DEVICES, 3, replace=False)]
        placement = with_replicas(OWNERS, [(e, d) for e, d in pairs if d != OWNERS.owner_E[e]])
    num_tokens = 2000
    score = rng.lognormal(0, 1, EXPERTS)
    score = np.log(score) + rng.gumbel(size=(DEVICES, num_tokens, EXPERTS))
    routed = score >= np.sort(score, axis=2)[:, :, -top_k, None]
    counts = routed.sum(axis=1)
    dispatch = plan_dispatch("even", counts, placement, TOPOLOGY)
    tokens_DD, tokens_DN = np.zeros((DEVICES, DEVICES)), np.zeros((DEVICES, NODES))
    for source in range(DEVICES):
        goes = np.zeros((num_tokens, DEVICES), bool)
        for expert, tokens_D in enumerate(np.rint(dispatch.sent_ED(source).cumsum(axis=1)).astype(int)):
            device = np.repeat(np.arange(DEVICES), np.diff(tokens_D, prepend=0))
            tokens = rng.permutation(np.flatnonzero(routed[source, :, expert]))
            goes[tokens, device] = True
        tokens_DD[source] = goes.sum(axis=0)
        tokens_DN[source] = goes.reshape(num_tokens, NODES, -1).any(axis=2).sum(axis=0)
    expected = expected_hops(counts, placement, TOPOLOGY, TokenChoices(top_k))
    np.testing.assert_allclose(expected.tokens_DN, tokens_DN, rtol=0.06, atol=0.02 * num_tokens)
    np.testing.assert_allclose(expected.tokens_DD, tokens_DD, rtol=0.06, atol=0.02 * num_tokens)
    drawn = hops_traffic(TwoHops(TOPOLOGY, tokens_DN, tokens_DD))
    estimated = hops_traffic(expected)
    assert estimated.far_of_node == pytest.approx(drawn.far_of_node, rel=0.06)
    assert estimated.near == pytest.approx(drawn.near, rel=0.06)


def test_busiest_links_are_those_of_single_hops():
    rng = np.random.default_rng(0)
    topology = Topology.from_labels([0, 1, 0, 1, 1, 2])
    size = topology.num_devices
    hops = TwoHops(topology, rng.integers(0, 100, (size, 3)), rng.integers(0, 100, (size, size)))
    first, second = ([hop(d)[0] for d in range(size)] for hop in (hops.first_hop, hops.second_hop))
    is_near = topology.node_of_device_D[:, None] == topology.node_of_device_D
    wanted = pairs_traffic(np.where(is_near, second, first), topology)
    assert astuple(hops_traffic(hops)) == pytest.approx(astuple(wanted))


@pytest.mark.parametrize(("top_k", "far"), [(1, 1.0), (2, 0.9), (8, 0.48)])
def test_tokens_per_pair_of_equal_loads(top_k, far):
    near, between = tokens_per_pair(TOPOLOGY, EXPERTS, TokenChoices(top_k))
    assert between == pytest.approx(far, abs=0.005)
    # Relays pass on the tokens of the other nodes, too.
    missed = comb(EXPERTS - EXPERTS // DEVICES, top_k) / comb(EXPERTS, top_k)
    assert near == pytest.approx(NODES * (1 - missed) / (top_k / DEVICES))
