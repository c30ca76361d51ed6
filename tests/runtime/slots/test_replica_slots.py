"""Replica slots: memory comes and goes, contents of experts that stay do not change, sums add up."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout
from megatron_fssdp.runtime.slots.replica_slots import ReplicaSlots
from tests.drawn_examples import examples

SHAPES = (torch.Size((3, 2)), torch.Size((2, 3)))
CPU = torch.device("cpu")


def made(*experts: int, dtype: torch.dtype = torch.float32):
    slots = ReplicaSlots(ExpertLayout(SHAPES, dtype), CPU)
    slots.hold(experts)
    return slots


@examples(50)
@given(
    st.lists(st.tuples(st.sets(st.integers(0, 6), max_size=4), st.booleans(), st.booleans()), max_size=8),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_memory_is_that_of_open_experts_and_contents_stay_with_their_expert(steps, dtype):
    slots = made(dtype=dtype)
    numel, sum_size = slots.layout.numel, torch.promote_types(dtype, torch.float32).itemsize
    parameter_of_slot: dict[int, torch.Tensor] = {}
    is_open: set[int] = set()
    for experts, closes, has_sums in steps:
        slots.hold(experts)
        assert slots.experts == tuple(sorted(experts))
        is_open &= experts
        slots.open_weights()
        for expert, flat in slots.weights().items():
            if expert in is_open:
                assert flat.eq(expert + 1).all(), "the expert's weights have changed"
            flat.fill_(expert + 1)
            # Parameters see what is written; their identity belongs to the slot for ever.
            for parameter in slots.parameters(expert):
                assert parameter.detach().eq(expert + 1).all()
                assert parameter_of_slot.setdefault(id(parameter), parameter) is parameter
        is_open = set(experts)
        if has_sums:
            slots.open_sums()
            assert all(total.eq(0).all() for total in slots.sums().values())
        held = len(experts) * numel * (dtype.itemsize + sum_size * has_sums)
        assert slots.held_bytes == held
        slots.close_sums()
        if closes:
            slots.close_weights()
            is_open = set()
            assert slots.held_bytes == 0
    assert len(parameter_of_slot) <= 2 * max((len(experts) for experts, _, _ in steps), default=0)


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


def test_open_weights_keep_their_place_while_a_transfer_writes_to_them():
    slots = made(1)
    slots.open_weights()
    address = slots.weights()[1].data_ptr()
    slots.open_weights()
    slots.hold([1, 2])
    slots.open_weights()
    assert slots.weights()[1].data_ptr() == address
