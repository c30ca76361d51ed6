import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.dispatch import balanced_dispatch
from megatron_fssdp.planning.dispatch.balanced_dispatch import level_tokens
from tests.drawn_examples import examples

from ..kernel_forms import answers_of_both_forms, needs_compiled
from ..placement_cases import placements, random_counts_DE


@needs_compiled
@examples(100)
@given(placements(), st.integers(0, 2**32 - 1))
def test_both_forms_deal_alike(case, seed):
    topology, placement = case
    counts_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts)
    calls = []
    balanced_dispatch.level_tokens, original = lambda *arguments: calls.append(arguments), level_tokens
    try:
        balanced_dispatch.balanced_dispatch(counts_DE, placement, topology)
    finally:
        balanced_dispatch.level_tokens = original
    plain, compiled = answers_of_both_forms(level_tokens, calls[0])
    assert plain == compiled
    assert np.sum(plain[2]) == np.sum(calls[0][1])  # tokens are redistributed, none are lost
