import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.systems.eplb import eplb_slots
from tests.drawn_examples import examples

FIRST_E = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
SECOND_E = [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]


@pytest.mark.parametrize(
    ("load_E", "wanted_P"),
    [
        (FIRST_E, [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]),
        (SECOND_E, [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]),
    ],
)
def test_the_example_of_the_readme_of_eplb(load_E, wanted_P):
    found_DU = eplb_slots(np.array(load_E), 8, slots=2, num_nodes=2, num_groups=4)
    assert found_DU.ravel().tolist() == wanted_P


@pytest.mark.parametrize(
    ("load_E", "num_groups", "wanted_P"),
    [
        ([300, 41, 7, 25, 33, 12, 5, 18], 1, [0, 0, 6, 0, 1, 2, 0, 4, 5, 0, 3, 7]),
        ([300, 41, 7, 25, 33, 12, 5, 18], 2, [0, 0, 2, 0, 1, 3, 4, 5, 6, 4, 7, 7]),
        ([900, 11, 2, 3], 1, [0, 0, 0, 0, 0, 1, 0, 0, 3, 0, 0, 2]),  # a device has three copies
    ],
)
def test_what_the_public_code_printed(load_E, num_groups, wanted_P):
    """``rebalance_experts`` of commit d52c72d, globally and hierarchically, on 2 nodes of 2 devices."""
    found_DU = eplb_slots(np.array(load_E), 4, slots=3, num_nodes=2, num_groups=num_groups)
    assert found_DU.ravel().tolist() == wanted_P


@examples(50)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_every_expert_has_copies_and_groups_stay_in_a_node(seed, num_nodes, num_groups, redundant):
    load_E = np.random.default_rng(seed).integers(0, 100, 16)
    slots = {"slots": 2 + redundant, "num_nodes": num_nodes, "num_groups": num_groups}
    found_DU = eplb_slots(load_E, 8, **slots)
    assert found_DU.shape == (8, 2 + redundant)
    assert set(found_DU.ravel()) == set(range(16))
    copies_E = np.bincount(found_DU.ravel())
    if num_groups % num_nodes:
        # No other numbers of copies have a lower highest load of a copy.
        lower = 0.999 * (load_E / copies_E).max()
        assert np.maximum(np.ceil(load_E / lower), 1).sum() > found_DU.size
        return
    nodes_of_group = [set() for _ in range(num_groups)]
    for device, experts in enumerate(found_DU):
        for expert in experts:
            nodes_of_group[expert * num_groups // 16].add(device * num_nodes // 8)
    assert all(len(nodes) == 1 for nodes in nodes_of_group)
