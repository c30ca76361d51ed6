import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.systems.exact_counts import equal_rows, least_loaded, quotas_in_nodes
from tests.drawn_examples import SEEDS, examples

OWNER_E = even_owners(16, 8)


def drawn_counts(seed):
    rng = np.random.default_rng(seed)
    return rng.multinomial(int(rng.integers(200)), rng.dirichlet(np.full(16, 0.3)), size=8)


def owners_only(load_E):
    return load_E[:, None] * (OWNER_E[:, None] == np.arange(8))


def conserved(tokens_ED, load_E):
    assert (tokens_ED >= 0).all()
    assert (tokens_ED.sum(axis=1) == load_E).all()
    return tokens_ED


@examples(50)
@given(SEEDS)
def test_moonep_gives_every_device_equal_rows_and_experts_of_one_other_owner(seed):
    load_E = drawn_counts(seed).sum(axis=0)
    tokens_ED = conserved(equal_rows(OWNER_E, load_E, 8), load_E)
    assert np.ptp(tokens_ED.sum(axis=0)) <= 1
    for device in range(8):
        owners = set(OWNER_E[tokens_ED[:, device] > 0]) - {device}
        assert len(owners) <= 1


@examples(50)
@given(SEEDS, st.floats(1.0, 3.0))
def test_llep_levels_uneven_loads_and_leaves_even_ones(seed, threshold):
    load_E = drawn_counts(seed).sum(axis=0)
    tokens_ED = conserved(least_loaded(OWNER_E, load_E, 8, threshold=threshold, fewest=0), load_E)
    plain_D = owners_only(load_E).sum(axis=0)
    if plain_D.max() < threshold * plain_D.mean():
        assert (tokens_ED == owners_only(load_E)).all()
    elif load_E.any():
        # A device takes at most what the division leaves over, above the mean.
        assert tokens_ED.sum(axis=0).max() <= max(load_E.sum() // 8, 1) + 7


def test_llep_spills_no_small_parts_unless_nothing_else_is_left():
    # The mean is 45. Beside device 3, devices have room for 15 and for 10.
    layer = np.arange(4), np.array([100, 35, 30, 15]), 4
    for fewest, wanted_D in ((0, [45, 10, 15, 30]), (20, [45, 0, 25, 30])):
        tokens_ED = least_loaded(*layer, fewest=fewest)
        assert tokens_ED[0].tolist() == wanted_D


@examples(50)
@given(SEEDS, st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_ultraep_levels_each_node_within_its_slots(seed, slots, num_nodes):
    load_E, topology = drawn_counts(seed).sum(axis=0), Topology.uniform(8, num_nodes)
    tokens_ED = conserved(quotas_in_nodes(OWNER_E, load_E, topology, slots=slots), load_E)
    replicas_ED = (tokens_ED > 0) & (OWNER_E[:, None] != np.arange(8))
    assert replicas_ED.sum(axis=0).max(initial=0) <= slots
    node_D = topology.node_of_device_D
    expert_P, device_P = np.nonzero(replicas_ED)
    assert (node_D[OWNER_E[expert_P]] == node_D[device_P]).all()
    assert tokens_ED.sum(axis=0).max() <= owners_only(load_E).sum(axis=0).max()
