"""Layers whose weights are put into slots of the node equal the reference, and share these slots."""

from contextlib import contextmanager
from unittest import mock

import pytest

from megatron_fssdp.collectives.sparse.peer_memory import WeightPuts
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.runtime.slots.node_slots import NodeSlots

from ..case_run import CaseRun, compare_with_reference
from ..layer_case import LayerCase
from ..rank_layer import run_layer_ranks

CASES = [
    LayerCase(f"puts-{name}", ReplicaLife.LAYER_PASS, puts=True, **options)
    for name, options in {
        "one-node": {"num_nodes": 1, "schedule": "FFBFBBE", "num_layers": 3},
        "two-nodes": {"schedule": "FFBB", "has_main_grad": True, "num_layers": 3},
        "recomputed": {"num_nodes": 1, "recompute": "reentrant", "schedule": "FFBB"},
        "repeated": {"num_nodes": 1, "repeats": True, "schedule": "FFBFBB", "placement": "everywhere"},
        "corrected": {"corrects": True, "schedule": "FFBB", "moves": True},
        "peers": {"peers": 2, "num_nodes": 1, "schedule": "FBFB"},
        "in-turn": {"overlaps": False, "schedule": "FFBB"},
    }.items()
] + [LayerCase("puts-mixed", puts=True, mixes=True, num_layers=3, schedule="FFBFBB")]


@contextmanager
def counted_puts():
    put, devices = WeightPuts.put, list[int]()

    def counting(self, copied):
        devices.extend(copied)
        put(self, copied)

    with mock.patch.object(WeightPuts, "put", counting):
        yield devices


def compare(rank, world_size):
    found = {}
    for case in CASES:
        with counted_puts() as puts:
            [result] = compare_with_reference(rank, world_size, [case]).values()
            found[case.name] = max(result.errors.values()), len(puts)
    return found


def test_layers_equal_the_reference():
    by_rank = run_layer_ranks(compare, 4)
    for case in CASES:
        assert max(found[case.name][0] for found in by_rank) <= 1e-10, case.name
        assert sum(found[case.name][1] for found in by_rank) > 0, case.name


def take_turns(rank, world_size):
    """Prefetch two layers, and use both: whether weights are there, what refuses, and the largest room."""
    case = LayerCase(
        "turns", ReplicaLife.LAYER_PASS, placement="everywhere", puts=True, num_nodes=1, schedule=""
    )
    run = CaseRun(case)
    run.runtime.begin_iteration()
    first, second = (layer.slots for layer in run.layers)
    one, other = (layer.passes.plan_iteration().transfers for layer in (first, second))
    assert one is not None
    assert other is not None
    there = []
    one.prefetch(backward=False)
    other.prefetch(backward=False)
    there += [one.is_gathered, other.is_gathered]
    one.begin_use(backward=False)
    one.await_weights()
    there += [one.is_gathered, other.is_gathered]
    held = {e: flat.clone() for e, flat in one.slots.weights().items()}
    assert held
    for e, flat in held.items():
        whole = [weight.detach().reshape(-1) for weight in run.layers[0].weights[e]]
        assert flat.tolist() == [x for weight in whole for x in weight.tolist()]
    with pytest.raises(RuntimeError) as caught:
        other.begin_use(backward=False)
    one.end_use()
    other.await_weights()
    there += [one.is_gathered, other.is_gathered]
    node = first.groups.node
    assert isinstance(node, NodeSlots)
    [room] = node._rooms.values()
    return there, str(caught.value), room.num_slots


def test_a_layer_gives_way_unless_it_is_in_use():
    for there, message, num_slots in run_layer_ranks(take_turns, 2):
        assert there == [False, True, True, False, False, True]
        assert "unset FSSDP_PEER_PUTS" in message
        assert num_slots == 4
