import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.fssdp.heterogeneous_sharding import heterogeneous_sharding
from tests.drawn_examples import examples


@st.composite
def cases(draw: st.DrawFn) -> tuple[OwnerMap, np.ndarray, Topology, int]:
    """(a map after some moves, integer loads with many ties, any nodes, overlap degree)."""
    num_layers, local, num_devices = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    even = OwnerMap.even(num_layers, local * num_devices, num_devices)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    owners = even.with_owners(rng.permutation(even.device_LE.reshape(-1)).reshape(even.device_LE.shape))
    load_LE = rng.integers(0, draw(st.sampled_from([1, 3, 100])), size=even.device_LE.shape, endpoint=True)
    labels = draw(st.lists(st.integers(0, 2), min_size=num_devices, max_size=num_devices))
    return owners, load_LE, Topology.from_labels(labels), draw(st.integers(0, local * num_devices + 1))


def reference(owners, load_LE, topology, overlap_degree):
    """Alg. 2 taken literally: every step searches all nodes and devices again."""
    num_layers, num_experts = load_LE.shape
    devices = range(owners.num_devices)
    free = [owners.slots_per_device] * owners.num_devices
    placed = {}  # (layer, expert) -> device
    ranked = [sorted(range(num_experts), key=lambda e: -load_LE[layer, e]) for layer in range(num_layers)]
    set_aside = [experts[:overlap_degree] for experts in ranked]
    remaining = [experts[overlap_degree:] for experts in ranked]

    def load_on(layer, device):
        return sum(int(load_LE[at]) for at, d in placed.items() if at[0] == layer and d == device)

    def assign(layer, expert, device):
        placed[layer, expert] = device
        free[device] -= 1

    def place(experts_L):
        order = [layer for layer in range(num_layers) if experts_L[layer]]
        for layer in sorted(order, key=lambda i: -load_LE[i, first_of[i]]):
            for expert in experts_L[layer]:
                owner = owners.device_LE[layer, expert]

                def node_key(node, layer=layer, owner=owner):
                    members = topology.devices_by_node[node]
                    load = sum(load_on(layer, d) for d in members) / len(members)
                    return load, sum(free[d] for d in members) / len(members), owner not in members, node

                def device_key(device, layer=layer, owner=owner):
                    return load_on(layer, device), free[device], device != owner, device

                node = min((topology.node_of_device[d] for d in devices if free[d]), key=node_key)
                assign(
                    layer, expert, min((d for d in topology.devices_by_node[node] if free[d]), key=device_key)
                )

    first_of = [experts[0] if experts else -1 for experts in remaining]
    place(remaining)
    everything = [(layer, expert) for layer in range(num_layers) for expert in set_aside[layer]]
    for layer, expert in sorted(everything, key=lambda at: (-load_LE[at], at)):
        if free[owners.device_LE[layer, expert]]:
            assign(layer, expert, owners.device_LE[layer, expert])
    first_of = [experts[0] if experts else -1 for experts in set_aside]
    place([[e for e in experts if (layer, e) not in placed] for layer, experts in enumerate(set_aside)])
    return np.array([[placed[layer, e] for e in range(num_experts)] for layer in range(num_layers)])


@examples(300)
@given(cases())
def test_owners_equal_those_of_the_literal_algorithm(case):
    owners, load_LE, topology, overlap_degree = case
    new = heterogeneous_sharding(owners, load_LE, topology, overlap_degree=overlap_degree)
    assert new.device_LE.tolist() == reference(owners, load_LE, topology, overlap_degree).tolist()


@examples(100)
@given(cases())
def test_the_same_loads_again_move_nothing(case):
    owners, load_LE, topology, overlap_degree = case
    new = heterogeneous_sharding(owners, load_LE, topology, overlap_degree=overlap_degree)
    again = heterogeneous_sharding(new, load_LE * 3.0, topology, overlap_degree=overlap_degree)
    assert new.moves_to(again) == ()
    if overlap_degree >= owners.num_experts:
        assert owners.moves_to(new) == ()
