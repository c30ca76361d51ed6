"""Layers whose weights are put into slots of the node equal the reference, and share these slots."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.sparse.peer_memory import WeightPuts
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.runtime.slots.node_slots import NodeSlots
from tests.support.training_preload import on_layer_ranks

from ..case_run import CaseRun, compare_with_reference
from ..layer_case import LayerCase

CASES = [
    LayerCase(f"puts-{name}", ReplicaLife.LAYER_PASS, puts=True, **options)
    for name, options in {
        "two-nodes": {"schedule": "FFBB", "has_main_grad": True, "num_layers": 3},
        "corrected": {"corrects": True, "schedule": "FFBB", "moves": True},
        "peers": {"peers": 2, "num_nodes": 1, "schedule": "FBFB"},
        "recomputed": {"num_nodes": 1, "recompute": "reentrant", "schedule": "FFBB"},
        "repeated": {"num_nodes": 1, "repeats": True, "schedule": "FFBFBB", "placement": "everywhere"},
        "in-turn": {"num_nodes": 1, "overlaps": False, "schedule": "FFBBE"},
    }.items()
] + [LayerCase("puts-mixed", puts=True, mixes=True, num_nodes=1, num_layers=3, schedule="FFBFBBE")]


@contextmanager
def counted_puts():
    put, devices = WeightPuts.put, list[int]()

    def counting(self, copied):
        devices.extend(copied)
        put(self, copied)

    with mock.patch.object(WeightPuts, "put", counting):
        yield devices


@on_layer_ranks(4)
def test_layers_of_several_nodes_or_peers_equal_the_reference():
    check(CASES[:3])


@on_layer_ranks(2)
def test_layers_of_one_node_equal_the_reference():
    check(CASES[3:])


def check(cases):
    for case in cases:
        with counted_puts() as puts:
            [result] = compare_with_reference(dist.get_rank(), dist.get_world_size(), [case]).values()
        assert max(result.errors.values()) <= 1e-10, case.name
        num_puts = torch.tensor(len(puts))
        dist.all_reduce(num_puts)
        assert num_puts > 0, case.name


@on_layer_ranks(2)
def test_a_layer_gives_way_unless_it_is_in_use():
    """Prefetch two layers, and use both."""
    case = LayerCase(
        "turns", ReplicaLife.LAYER_PASS, placement="everywhere", puts=True, num_nodes=1, schedule=""
    )
    run = CaseRun(case)
    run.runtime.begin_iteration()
    first, second = (layer.slots for layer in run.layers)
    of_first, of_second = (layer.passes.plan_iteration().transfers for layer in (first, second))
    assert of_first is not None
    assert of_second is not None
    of_first.prefetch(backward=False)
    of_second.prefetch(backward=False)
    assert [of_first.is_gathered, of_second.is_gathered] == [False, True]
    of_first.begin_use(backward=False)
    of_first.await_weights()
    assert [of_first.is_gathered, of_second.is_gathered] == [True, False]
    held = {e: flat.clone() for e, flat in of_first.slots.weights().items()}
    assert held
    for e, flat in held.items():
        whole = [weight.detach().reshape(-1) for weight in run.layers[0].weights[e]]
        assert flat.tolist() == [x for weight in whole for x in weight.tolist()]
    with pytest.raises(RuntimeError, match="unset FSSDP_PEER_PUTS"):
        of_second.begin_use(backward=False)
    of_first.end_use()
    of_second.await_weights()
    assert [of_first.is_gathered, of_second.is_gathered] == [False, True]
    node = first.groups.node
    assert isinstance(node, NodeSlots)
    [room] = node._rooms.values()
    assert room.num_slots == 4
