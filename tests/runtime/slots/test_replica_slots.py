"""Replica slots: memory comes and goes, contents of experts that stay do not change, sums add up."""

import pytest
import torch

from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout
from megatron_fssdp.runtime.slots.replica_slots import ReplicaSlots

SHAPES = (torch.Size((3, 2)), torch.Size((2, 3)))
CPU = torch.device("cpu")


def made(*experts: int, dtype: torch.dtype = torch.float32):
    slots = ReplicaSlots(ExpertLayout(SHAPES, dtype), CPU)
    slots.hold(experts)
    return slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_to_the_sums(dtype):
    """Also those that a fused kernel has added itself, which sets the mark."""
    slots = made(4, 7, dtype=dtype)
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


def test_a_weight_that_autograd_saved_can_be_released_and_gathered_again():
    slots = made(0)
    slots.open_weights()
    slots.weights()[0].fill_(3.0)
    x = torch.ones(1, 2, requires_grad=True)
    y = torch.nn.functional.linear(x, slots.parameters(0)[0])
    slots.close_weights()
    assert slots.held_bytes == 0
    slots.open_weights()
    slots.weights()[0].fill_(3.0)
    slots.open_sums()
    y.sum().backward()
    assert x.grad.eq(9.0).all()


def test_experts_that_stay_keep_their_slot_their_place_and_their_contents():
    """Also while a transfer writes to them."""
    slots = made(1, 3)
    slots.open_weights()
    kept, parameters = slots.weights()[3], slots.parameters(3)
    kept.fill_(7.0)
    address = kept.data_ptr()
    slots.hold([2, 3, 4])
    slots.open_weights()
    assert slots.experts == (2, 3, 4)
    assert slots.weights()[3].data_ptr() == address
    assert slots.parameters(3) is parameters
    assert all(parameter.detach().eq(7.0).all() for parameter in parameters)
    assert slots.held_bytes == 3 * slots.layout.num_bytes
    slots.hold([4])
    assert slots.held_bytes == slots.layout.num_bytes
