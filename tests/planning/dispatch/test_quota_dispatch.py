import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.dispatch.quota_dispatch import QuotaDispatch
from megatron_fssdp.planning.placement.topology import Topology
from tests.drawn_examples import examples

from ..placement_cases import random_counts_DE, topologies
from ..sent_tables import sent_by_all


@st.composite
def quota_cases(draw):
    """(topology, counts_DE, own_DE, near_DE, far_DE) with random quotas that the tokens can fill."""
    topology = draw(topologies())
    num_experts = draw(st.integers(1, 6))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    shape = (topology.num_devices, num_experts)
    counts_DE = random_counts_DE(seed, *shape)
    own_DE, near_DE, far_DE = np.zeros((3, *shape), dtype=np.int64)
    node_D = np.array(topology.node_of_device)
    for expert in range(num_experts):
        holders = rng.random(topology.num_devices) < draw(st.sampled_from([0.3, 0.8]))
        holders[rng.integers(topology.num_devices)] = True
        own_DE[holders, expert] = rng.integers(0, counts_DE[holders, expert] + 1)
        leaving_D = counts_DE[:, expert] - own_DE[:, expert]
        left_N = np.bincount(node_D, weights=leaving_D).astype(int)
        with_holder = np.unique(node_D[holders])
        # One node takes all remaining tokens; its own tokens stay in it.
        taker = rng.choice(with_holder)
        for node in with_holder:
            stays = left_N[node] if node == taker else rng.integers(0, left_N[node] + 1)
            near_DE[:, expert] += dealt(rng, stays, holders & (node_D == node))
            left_N[node] -= stays
        far_DE[:, expert] = dealt(rng, left_N.sum(), holders & (node_D == taker))
    return topology, counts_DE, own_DE, near_DE, far_DE


def dealt(rng, amount, takers):
    """A random division of an amount, int64 [D]."""
    shares = takers / takers.sum()
    return rng.multinomial(amount, shares).astype(np.int64)


def dispatch_of(counts_DE, own_DE, near_DE, far_DE, topology):
    """The dispatch with the quotas of three tables."""
    expert_P, device_P = np.nonzero(((own_DE != 0) | (near_DE != 0) | (far_DE != 0)).T)
    quotas = [table_DE[device_P, expert_P] for table_DE in (own_DE, near_DE, far_DE)]
    return QuotaDispatch(counts_DE, np.stack([expert_P, device_P, *quotas]), topology)


def near_tokens_D(counts_DE, own_DE, near_DE, topology):
    """The tokens of each device that fill the near quotas of its node, the first devices first, int64 [D]."""
    near_D = np.zeros(topology.num_devices, np.int64)
    for members in map(list, topology.devices_by_node):
        leaving_end_DE = np.cumsum((counts_DE - own_DE)[members], axis=0)
        near_end_DE = np.minimum(leaving_end_DE, near_DE[members].sum(axis=0))
        near_D[members] = np.diff(near_end_DE, axis=0, prepend=0).sum(axis=1)
    return near_D


@examples(200)
@given(quota_cases())
def test_rows_fill_the_quotas(case):
    topology, counts_DE, own_DE, near_DE, far_DE = case
    dispatch = dispatch_of(counts_DE, own_DE, near_DE, far_DE, topology)
    devices = range(topology.num_devices)
    full = sent_by_all(dispatch)
    assert full.dtype == np.int64
    assert (full >= 0).all()
    np.testing.assert_array_equal(full.sum(axis=2), counts_DE)
    np.testing.assert_array_equal(dispatch.device_tokens_D(), full.sum(axis=(0, 1)))
    np.testing.assert_array_equal(dispatch.sums()[1], near_tokens_D(counts_DE, own_DE, near_DE, topology))
    node_D = np.array(topology.node_of_device)
    for device in devices:
        from_DE = full[:, :, device]
        near_D = (node_D == node_D[device]) & (np.arange(topology.num_devices) != device)
        np.testing.assert_array_equal(from_DE[node_D != node_D[device]].sum(axis=0), far_DE[device])
        # A token that leaves its device can come back to it, because both ends are in the node.
        np.testing.assert_array_equal(
            from_DE[near_D].sum(axis=0) + from_DE[device], own_DE[device] + near_DE[device]
        )
        assert (from_DE[device] >= own_DE[device]).all()
    crossing_DD = node_D[:, None] != node_D[None, :]
    assert dispatch.cross_node_tokens() == full.sum(axis=1)[crossing_DD].sum()


def test_quotas_are_filled_with_tokens_of_the_same_node_first():
    topology = Topology.uniform(4, 2)
    counts_DE = np.array([[4], [4], [4], [4]])
    own_DE = np.array([[4], [0], [4], [0]])
    near_DE = np.array([[1], [0], [4], [0]])
    far_DE = np.array([[0], [0], [3], [0]])
    dispatch = dispatch_of(counts_DE, own_DE, near_DE, far_DE, topology)
    wanted = [[4, 0, 0, 0], [1, 0, 3, 0], [0, 0, 4, 0], [0, 0, 4, 0]]
    assert sent_by_all(dispatch)[:, 0].tolist() == wanted
    assert dispatch.cross_node_tokens() == 3


def test_bad_quotas_say_what_was_wanted():
    topology = Topology.uniform(2, 2)
    counts_DE, none_DE = np.array([[3], [1]]), np.zeros((2, 1), dtype=np.int64)
    with pytest.raises(ValueError, match="got quotas that are negative, or above the tokens"):
        dispatch_of(counts_DE, np.array([[4], [0]]), none_DE, none_DE, topology)
    with pytest.raises(ValueError, match="got quotas that are negative, or above the tokens"):
        dispatch_of(counts_DE, counts_DE, np.array([[1], [0]]), none_DE, topology)
    with pytest.raises(
        ValueError, match=r"left with \[0, 1\] tokens of expert 0 and have quotas for \[0, 0\]"
    ):
        dispatch_of(counts_DE, np.array([[3], [0]]), none_DE, none_DE, topology)
    with pytest.raises(ValueError, match="no node with both"):
        dispatch_of(counts_DE, np.array([[3], [0]]), none_DE, np.array([[0], [1]]), topology)
