"""The smooth price of the replica search: changes by moves, and the level of moves between nodes."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.balanced.replica_planner import layer_search
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.kernels.parts.smooth_price import _FORBIDDEN
from megatron_fssdp.planning.kernels.replica_search import _describe, _Search
from megatron_fssdp.planning.placement.topology import Topology
from tests.drawn_examples import examples

from ..placement_cases import owned_layers, random_counts_DE

SLOTS = 2
PROFILE = LayerProfile(
    non_moe_s=0.0,
    cluster=ClusterCost(LinkCost(0.0, 1e-6), LinkCost(0.0, 1e-6), expert_flops_per_s=1.0),
    expert_bytes=1,
    token_bytes=10**6,
    flops_per_token=1.0,
    memory_capacity=SLOTS,
)


def search_of(topology: Topology, owner_E: np.ndarray, counts_DE: np.ndarray, near_s: float) -> _Search:
    """The kernel's class in its plain form, with every expert on its owner only."""
    cluster = dataclasses.replace(PROFILE.cluster, intra=LinkCost(0.0, near_s))
    profile = dataclasses.replace(PROFILE, cluster=cluster)
    layer = layer_search(owner_E, counts_DE, topology, profile, rematerialize=False, hides=True)
    search = _Search(owner_E.size, topology.num_devices, topology.num_nodes, SLOTS)
    _describe(search, *(memoryview(array) for array in layer._arrays))
    search.max_replicated = owner_E.size
    search.line_up_owned()
    search.fill()
    return search


def smooth_price(search: _Search) -> float:
    """The smooth price from all sums, with the present weights."""
    loads = np.sum(np.array(search.load_D) ** 4)
    links = np.sum((search.far_s * np.array([search.far_in_N, search.far_out_N])) ** 4)
    if search.counts_near:
        links += np.sum((search.near_s * np.array([search.in_D, search.out_D])) ** 4)
    return float(search.load_weight * loads + search.link_weight * links)


def random_move(search: _Search, rng: np.random.Generator) -> tuple[int, int, int]:
    """An expert, a device that gets it or -1, and a device that loses it or -1."""
    expert = int(rng.integers(search.num_experts))
    row = expert * search.num_devices
    holders = [search.holder_ED[row + i] for i in range(search.holders_E[expert])]
    free = [d for d in range(search.num_devices) if d not in holders and search.used_D[d] < SLOTS]
    add = int(rng.choice(free)) if free and rng.random() < 0.7 else -1
    drop = int(rng.choice(holders[1:])) if len(holders) > 1 and rng.random() < 0.5 else -1
    return expert, add, drop


CASES = (owned_layers(), st.integers(0, 2**32 - 1), st.sampled_from([1e-7, 1e-6, 1e-5]))


@examples(100)
@given(*CASES)
def test_the_change_by_a_move_is_the_difference_of_the_smooth_prices(case, seed, near_s) -> None:
    topology, owner_E = case
    rng = np.random.default_rng(seed)
    search = search_of(topology, owner_E, random_counts_DE(seed, topology.num_devices, owner_E.size), near_s)
    search.level = owner_E.size
    for _ in range(12):
        search.weigh()
        expert, add, drop = random_move(search, rng)
        before, change = smooth_price(search), search.change_by(expert, add, drop)
        search.move(expert, add, drop)
        largest = max(before, smooth_price(search))
        np.testing.assert_allclose(smooth_price(search) - before, change, rtol=1e-9, atol=1e-9 * largest)


@examples(100)
@given(*CASES)
def test_moves_keep_the_experts_on_each_nic_within_the_level(case, seed, near_s) -> None:
    """A move is forbidden exactly if it brings more than ``level`` experts over a NIC that it uses."""
    topology, owner_E = case
    rng = np.random.default_rng(seed)
    search = search_of(topology, owner_E, random_counts_DE(seed, topology.num_devices, owner_E.size), near_s)
    search.weigh()
    for _ in range(12):
        expert, add, drop = random_move(search, rng)
        before = np.array([search.gets_N, search.sends_N])
        search.level = int(rng.integers(1, 3))
        is_forbidden = search.change_by(expert, add, drop) == _FORBIDDEN
        search.move(expert, add, drop)
        after = np.array([search.gets_N, search.sends_N])
        if np.any((after > before) & (after > search.level)):
            assert is_forbidden
        elif np.all(after <= search.level):
            assert not is_forbidden
