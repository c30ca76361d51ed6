import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.strategies.fssdp.sparse_materialization import apportion_replicas, sparse_materialization
from tests.drawn_examples import examples
from tests.planning.placement_cases import owned_layers

SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    ("loads", "total", "most", "numbers"),
    [
        ([8.0, 4.0, 4.0], 4, 3, [2, 1, 1]),
        ([5.0, 3.0, 2.0], 4, 9, [2, 1, 1]),  # shares 2, 1.2, 0.8
        ([4.0, 4.0, 4.0], 4, 9, [2, 1, 1]),  # equal remainders: the first expert gets the replica
        ([90.0, 6.0, 4.0], 8, 3, [3, 3, 2]),  # 7.2 is capped at 3; the other 5 are apportioned again
        ([1.0], 8, 3, [3]),
        ([1.0, 1.0], 8, 0, [0, 0]),
    ],
)
def test_replicas_are_apportioned_in_proportion_to_loads(loads, total, most, numbers):
    assert apportion_replicas(loads, total, most) == numbers


@examples(200)
@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12), st.integers(0, 60), st.integers(0, 9))
def test_apportioning_uses_every_slot_that_fits(loads, total, most):
    loads = sorted(loads, reverse=True)
    numbers = apportion_replicas(loads, total, most)
    assert sum(numbers) == min(total, most * len(loads))
    assert all(0 <= number <= most for number in numbers)
    assert numbers == sorted(numbers, reverse=True) or len(set(loads)) < len(loads)


def literal_alg1(owner_E, load_E, topology, num_top, slots):
    """Alg. 1 taken literally, one replica at a time."""
    num_experts, num_devices = owner_E.size, topology.num_devices
    present = np.zeros((num_experts, num_devices), dtype=bool)
    present[np.arange(num_experts), owner_E] = True
    num_top = min(num_top, num_experts)
    slots = min(slots, num_top)
    top = sorted(range(num_experts), key=lambda e: (-load_E[e], e))[:num_top]
    top = [expert for expert in top if load_E[expert] > 0]
    if slots == num_top:
        present[top] = True
        return present
    free = [slots] * num_devices
    numbers = apportion_replicas([load_E[e] for e in top], num_devices * slots, num_devices - 1)
    unplaced = 0
    for expert, number in zip(top, numbers, strict=True):
        for _ in range(min(number + unplaced, num_devices - 1)):

            def key(device, expert=expert):
                node = topology.devices_by_node[topology.node_of_device[device]]
                has = any(present[expert, other] for other in node)
                return (has, -sum(free[other] for other in node), -free[device], device)

            allowed = [d for d in range(num_devices) if free[d] and not present[expert, d]]
            if allowed:
                device = min(allowed, key=key)
                present[expert, device] = True
                free[device] -= 1
        unplaced += number - (present[expert].sum() - 1)
    return present


@examples(200)
@given(owned_layers(), SEEDS, st.integers(0, 11), st.integers(0, 4), st.sampled_from([0.0, 0.5, 2.0]))
def test_placements_equal_those_of_the_literal_algorithm(case, seed, overlap_degree, slots, sigma):
    topology, owner_E = case
    load_E = np.round(np.random.default_rng(seed).lognormal(1, sigma, owner_E.size))
    placement = sparse_materialization(owner_E, load_E, topology, overlap_degree=overlap_degree, slots=slots)
    np.testing.assert_array_equal(
        placement.present_ED, literal_alg1(owner_E, load_E, topology, overlap_degree, slots)
    )
    assert placement.replicas_per_device_D.max() <= slots
    assert (np.count_nonzero(placement.present_ED, axis=1) > 1).sum() <= overlap_degree
    strided = np.repeat(load_E, 3)[::3]
    again = sparse_materialization(
        owner_E.astype(np.int32), strided, topology, overlap_degree=overlap_degree, slots=slots
    )
    assert placement == again
