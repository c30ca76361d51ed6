"""Remaps by shares from exact counts go where the host's whole tokens go, and wait for nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fssdp.planning.dispatch.token_dispatch import plan_dispatch
from megatron_fssdp.planning.dispatch.whole_tokens import whole_tokens
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.slot_tables import even_table
from megatron_fssdp.runtime.slots.remap import shares
from megatron_fssdp.runtime.slots.remap.reference import by_number, remap_by_table
from megatron_fssdp.runtime.slots.remap.shares import Shares
from tests.drawn_examples import SEEDS, examples
from tests.planning.placement_cases import placements, random_counts_DE, slots_of

kernels = pytest.importorskip("megatron_fssdp.runtime.slots.remap.kernels")


@examples(60)
@given(
    placements(), SEEDS, st.sampled_from([0, 1, 200]), st.booleans(), st.sampled_from([False] * 5 + [True])
)
def test_the_remap_follows_the_shares(case, seed, num_tokens, is_counted, in_triton):
    topology, placement = case
    rng = np.random.default_rng(seed)
    slots, source = slots_of(placement), int(rng.integers(placement.num_devices))
    popularity_E = rng.random(placement.num_experts) ** 2
    routing_map = torch.tensor(rng.random((num_tokens, placement.num_experts)) < popularity_E)
    count_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts)
    if is_counted:
        count_DE[source] = routing_map.sum(0).numpy()
    probs = torch.tensor(rng.random(routing_map.shape), requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "_kernels_for", lambda device: kernels if in_triton else None)
        where = topology, source, torch.device("cpu")
        made = Shares.exact(slots, placement, *where, lambda counts_E: torch.tensor(count_DE))
        slot_map, slot_probs = made.remap(routing_map, probs)
    # Even if the counts are those of other tokens, every token reaches a slot of each of its experts, once.
    expert_W = torch.tensor(slots.expert_DU.reshape(-1))
    for expert in range(placement.num_experts):
        of_expert = expert_W == expert
        assert torch.equal(slot_map[:, of_expert].sum(1), routing_map[:, expert].long())
        torch.testing.assert_close(slot_probs[:, of_expert].sum(1), probs[:, expert], rtol=0, atol=0)
    assert not slot_map[:, expert_W < 0].any()
    upstream = torch.tensor(rng.random(slot_probs.shape))
    (slot_probs * slot_map * upstream).sum().backward()
    wanted = torch.zeros_like(probs.detach())
    token, slot = slot_map.nonzero(as_tuple=True)
    wanted[token, expert_W[slot]] = upstream[token, slot]
    torch.testing.assert_close(probs.grad, wanted, rtol=0, atol=0)
    if is_counted and not in_triton:
        quotas_ED = plan_dispatch("exact", count_DE, placement, topology).whole_tokens_ED
        sent_ED = whole_tokens(count_DE, quotas_ED, topology, source).sent_ED
        in_slot_ED = slot_map.sum(0).numpy()[slots.slot_ED] * placement.present_ED
        np.testing.assert_array_equal(in_slot_ED, sent_ED)


def test_nothing_waits_for_the_host():
    """Fake tensors have no values, so whatever a host would have to know or a shape depend on is an error."""
    placement = ExpertPlacement(np.arange(4) // 2, np.ones((4, 2), bool))
    table_EJ = torch.tensor(by_number(even_table(slots_of(placement), placement, Topology.uniform(2, 1), 0)))
    with FakeTensorMode() as mode:
        given = torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 4), table_EJ
        results = remap_by_table(*map(mode.from_tensor, given), 8)
    assert [tuple(result.shape) for result in results] == [(1, 8)] * 2
