import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.runtime.slots.remap.reference import by_number, remap_by_table
from tests.drawn_examples import SEEDS, examples
from tests.planning.placement_cases import placements, slots_of


def drawn_routing(rng, num_tokens, num_experts):
    """Tokens with no, some or all experts, and probabilities also where the map is false."""
    density = rng.choice([0.0, 0.3, 1.0], (num_tokens, 1))
    routing_map = torch.tensor(rng.random((num_tokens, num_experts)) < density)
    return routing_map, torch.tensor(rng.random((num_tokens, num_experts)), dtype=torch.float32)


@examples(100)
@given(placements(), SEEDS, st.sampled_from([0, 1, 7, 90]), st.sampled_from([1, 4, 64]))
def test_every_token_goes_to_the_slot_of_the_table(case, seed, num_tokens, rows):
    _, placement = case
    rng = np.random.default_rng(seed)
    slots = slots_of(placement)
    columns = [rng.choice(slot_D[slot_D >= 0], rows) for slot_D in slots.slot_ED]
    table_JE = np.stack(columns, axis=1)
    routing_map, probs = drawn_routing(rng, num_tokens, placement.num_experts)
    probs.requires_grad_()
    slot_map, slot_probs = remap_by_table(
        routing_map, probs, torch.tensor(by_number(table_JE)), slots.num_slots
    )
    assert (slot_map.dtype, slot_probs.dtype) == (torch.bool, torch.float32)
    assert slot_map.shape == slot_probs.shape == (num_tokens, slots.num_slots)

    # The reference goes token by token.
    wanted = torch.zeros(num_tokens, slots.num_slots, dtype=torch.bool)
    wanted_probs, number_E = torch.zeros(wanted.shape), np.zeros(placement.num_experts, int)
    upstream = torch.tensor(rng.normal(size=wanted.shape), dtype=torch.float32)
    wanted_gradient = torch.zeros_like(probs)
    for token, expert in np.argwhere(routing_map.numpy()):
        slot = table_JE[number_E[expert] % rows, expert]
        number_E[expert] += 1
        wanted[token, slot] = True
        wanted_probs[token, slot] = probs[token, expert].item()
        wanted_gradient[token, expert] = upstream[token, slot]
    assert torch.equal(slot_map, wanted)
    assert torch.equal(slot_probs * slot_map, wanted_probs)
    (slot_probs * slot_map * upstream).sum().backward()
    assert torch.equal(probs.grad, wanted_gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_probabilities_keep_their_type_and_all_entries(dtype):
    routing_map = torch.tensor([[True, False], [False, False]])
    probs = torch.tensor([[0.5, 0.25], [0.75, 0.125]], dtype=dtype)
    slot_map, slot_probs = remap_by_table(routing_map, probs, torch.tensor(by_number(np.array([[3, 1]]))), 4)
    assert slot_map.tolist() == [[False, False, False, True], [False] * 4]
    assert (slot_probs.dtype, slot_probs.tolist()) == (dtype, [[0, 0.25, 0, 0.5], [0, 0.125, 0, 0.75]])
