"""Sums of replicas' gradients add up; layers test when memory comes and goes, and what stays in it."""

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout
from megatron_fssdp.runtime.slots.replica_slots import ReplicaSlots

SHAPES = (torch.Size((3, 2)), torch.Size((2, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_to_the_sums(dtype):
    """Also those that a fused kernel has added itself, which sets the mark."""
    slots = ReplicaSlots(ExpertLayout(SHAPES, dtype, len(SHAPES)), torch.device("cpu"))
    slots.hold((4, 7))
    slots.open_weights()
    for flat in slots.weights().values():
        flat.fill_(1.0)
    slots.open_sums()
    first, second = slots.parameters(7)
    for number in range(2):
        slots.open_sums()  # open sums keep their contents
        second.grad_added_to_main_grad = number == 1
        ((2.0 * first.sum()) + (0.5 * second).sum()).backward()
        assert first.grad is None
        assert second.grad is None
    fc1, fc2 = slots.layout.unpack(slots.sums()[7])
    assert fc1.eq(4.0).all()
    assert fc2.eq(0.5).all()
    assert fc1.dtype is torch.float32
    assert slots.sums()[4].eq(0).all()
    slots.close_sums()
    slots.open_sums()
    assert slots.sums()[7].eq(0).all(), "reopened sums begin with zeros"


def test_autograd_adds_gradients_where_the_forward_pass_ran():
    """On CUDA, an AccumulateGrad node keeps the stream on which it was made.

    Those of replicas are made by a forward pass and end with its graph, so they have the stream of the
    experts, and not that on which the slots were made: sums are complete where the experts' backward pass is.
    """
    slots = ReplicaSlots(ExpertLayout(SHAPES, torch.float32, len(SHAPES)), torch.device("cpu"))
    slots.hold((4,))
    slots.open_weights()
    slots.open_sums()
    first, second = slots.parameters(4)
    for _ in range(2):
        total = first.sum() + second.sum()
        nodes = [get_gradient_edge(parameter).node for parameter in (first, second)]
        assert [node.metadata for node in nodes] == [{}, {}], "nodes of an earlier pass are still there"
        for node in nodes:
            node.metadata["pass"] = "this one"
        del nodes, node
        assert get_gradient_edge(first).node.metadata, "the graph keeps the nodes"
        total.backward()
        del total


def test_a_cast_of_torch_autocast_is_that_of_the_expert_in_the_slot():
    """One context around several micro-batches has the weights of each of them."""
    slots = ReplicaSlots(ExpertLayout(SHAPES, torch.float32, len(SHAPES)), torch.device("cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for expert in (4, 7):
            slots.hold((expert,))
            slots.open_weights()
            slots.weights()[expert].fill_(expert)
            assert torch.mm(torch.ones(1, 3), slots.parameters(expert)[0]).eq(3 * expert).all()
