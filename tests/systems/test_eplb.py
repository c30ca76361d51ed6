import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.systems.eplb import eplb_slots
from tests.drawn_examples import SEEDS, examples

FIRST_E = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
SECOND_E = [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]


HOT_E = [300, 41, 7, 25, 33, 12, 5, 18]


@pytest.mark.parametrize(
    ("load_E", "sizes", "wanted_P"),  # devices, slots and groups, on two nodes
    [
        # The example of the README of EPLB.
        (FIRST_E, (8, 2, 4), [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]),
        (SECOND_E, (8, 2, 4), [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]),
        # What rebalance_experts of commit d52c72d printed, globally and hierarchically.
        (HOT_E, (4, 3, 1), [0, 0, 6, 0, 1, 2, 0, 4, 5, 0, 3, 7]),
        (HOT_E, (4, 3, 2), [0, 0, 2, 0, 1, 3, 4, 5, 6, 4, 7, 7]),
        ([900, 11, 2, 3], (4, 3, 1), [0, 0, 0, 0, 0, 1, 0, 0, 3, 0, 0, 2]),  # a device has three copies
    ],
)
def test_slots_are_those_of_the_public_code(load_E, sizes, wanted_P):
    devices, slots, groups = sizes
    expert_DU = eplb_slots(np.array(load_E), devices, slots=slots, num_nodes=2, num_groups=groups)
    assert expert_DU.ravel().tolist() == wanted_P


@examples(50)
@given(SEEDS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_every_expert_has_copies_and_groups_stay_in_a_node(seed, num_nodes, num_groups, redundant):
    load_E = np.random.default_rng(seed).integers(0, 100, 16)
    slots = {"slots": 2 + redundant, "num_nodes": num_nodes, "num_groups": num_groups}
    expert_DU = eplb_slots(load_E, 8, **slots)
    assert expert_DU.shape == (8, 2 + redundant)
    assert set(expert_DU.ravel()) == set(range(16))
    copies_E = np.bincount(expert_DU.ravel())
    if num_groups % num_nodes:
        # No other numbers of copies have a lower highest load of a copy.
        lower = 0.999 * (load_E / copies_E).max()
        assert np.maximum(np.ceil(load_E / lower), 1).sum() > expert_DU.size
        return
    of_nodes = expert_DU.reshape(num_nodes, -1) * num_groups // 16
    assert sum(len(np.unique(groups)) for groups in of_nodes) == num_groups
