import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.quotas import quota_assignment

TOPOLOGY, OWNERS = Topology.uniform(4, 2), even_owners(8, 4)


def test_overflow_goes_to_the_node_of_its_tokens():
    """Expert 0 of device 0 has 40 tokens, all from node 1; all other loads are 0."""
    counts_DE = np.zeros((4, 8), np.int64)
    counts_DE[2, 0] = 40
    tokens_ED = quota_assignment(OWNERS, counts_DE, TOPOLOGY, slots=1)
    assert tokens_ED[0].tolist() == [10, 10, 10, 10]
    # With a ceiling of 20 one further device is enough, and it is in node 1.
    counts_DE = counts_DE[:2, :2] + [[0, 0], [8, 0]]
    tokens_ED = quota_assignment(OWNERS[:2], counts_DE, Topology.uniform(2, 2), slots=1)
    assert tokens_ED[0].tolist() == [4, 4]


def test_nothing_moves_without_need():
    even_DE = np.ones((4, 8), np.int64)
    assert np.count_nonzero(quota_assignment(OWNERS, even_DE, TOPOLOGY, slots=4)) == 8


@given(seed=st.integers(0, 10_000), slots=st.integers(0, 4), devices_per_node=st.sampled_from([1, 2, 4]))
def test_all_tokens_are_assigned_within_the_slots(seed, slots, devices_per_node):
    rng = np.random.default_rng(seed)
    topology = Topology.uniform(4, 4 // devices_per_node)
    counts_DE = rng.poisson(rng.gamma(0.4, 30, 8), (4, 8))
    tokens_ED = quota_assignment(OWNERS, counts_DE, topology, slots=slots)
    load_E = counts_DE.sum(axis=0)
    assert tokens_ED.min() >= 0
    assert tokens_ED.sum(axis=1).tolist() == load_E.tolist()
    others_ED = tokens_ED > 0
    others_ED[np.arange(8), OWNERS] = False
    assert others_ED.sum(axis=0).max() <= slots
    owned_D = np.bincount(OWNERS, weights=load_E, minlength=4)
    assert tokens_ED.sum(axis=0).max() <= owned_D.max()
