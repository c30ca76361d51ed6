"""Whole tokens of a dispatch: conservation, quotas kept, nearest first, and equal numbers at both ends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.dispatch.whole_tokens import whole_tokens
from megatron_fssdp.planning.placement.topology import Topology


@st.composite
def dispatches(draw):
    """Counts ``[D, E]``, quotas ``[E, D]``, and nodes in any order."""
    num_devices, num_experts = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    topology = Topology.from_labels([draw(st.integers(0, 2)) for _ in range(num_devices)])
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts_DE = random.integers(0, draw(st.sampled_from([2, 9, 1000])), (num_devices, num_experts))
    cuts = np.sort(random.integers(0, counts_DE.sum(axis=0)[:, None] + 1, (num_experts, num_devices - 1)))
    ends = np.concatenate([np.zeros((num_experts, 1), int), cuts, counts_DE.sum(axis=0)[:, None]], axis=1)
    return counts_DE, np.diff(ends), topology


@given(dispatches())
def test_every_quota_is_filled_with_the_nearest_tokens_and_every_token_is_sent_once(case):
    counts_DE, tokens_ED, topology = case
    all_devices = [whole_tokens(counts_DE, tokens_ED, topology, d) for d in range(len(counts_DE))]
    sent_SED = np.stack([tokens.sent_ED for tokens in all_devices])
    assert (sent_SED >= 0).all()
    assert np.array_equal(sent_SED.sum(axis=2), counts_DE)
    assert np.array_equal(sent_SED.sum(axis=0), tokens_ED)
    # What a device gets is what the others send to it: nobody has to tell.
    assert np.array_equal(np.stack([tokens.got_ED for tokens in all_devices]), sent_SED.transpose(2, 1, 0))

    own_ED = np.minimum(counts_DE.T, tokens_ED)
    assert np.array_equal(np.einsum("ded->ed", sent_SED), own_ED)
    for devices in map(list, topology.devices_by_node):
        inside_E = sent_SED[devices][:, :, devices].sum(axis=(0, 2))
        wanted_E, has_E = tokens_ED[:, devices].sum(axis=1), counts_DE[devices].sum(axis=0)
        assert np.array_equal(inside_E, np.minimum(wanted_E, has_E))


def test_quotas_of_other_counts_are_refused():
    with pytest.raises(ValueError, match="expert 1: got quotas of 3 tokens, wanted quotas of all its 4"):
        whole_tokens(np.array([[1, 4]]), np.array([[1], [3]]), Topology((0,)), 0)
