"""Kernels of even dispatch and of dispatch by quotas give equal answers in both forms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.balanced import quota_planner
from megatron_fssdp.planning.dispatch import even_dispatch, quota_dispatch
from megatron_fssdp.planning.dispatch.token_dispatch import plan_dispatch
from tests.drawn_examples import examples

from ..kernel_forms import answers_of_both_forms, needs_compiled
from ..placement_cases import placements, random_counts_DE
from ..sent_tables import sent_by_all

KERNELS = [
    (even_dispatch, "split_evenly"),
    (even_dispatch, "even_row"),
    (quota_dispatch, "are_fillable"),
    (quota_dispatch, "fill_quotas"),
    (quota_dispatch, "sum_quota_tokens"),
    (quota_dispatch, "quota_row"),
]


@needs_compiled
@examples(60)
@given(placements(), st.integers(0, 2**32 - 1))
def test_both_forms_make_equal_tables(case, seed):
    topology, placement = case
    counts_DE = random_counts_DE(seed, placement.num_devices, placement.num_experts)
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for module, name in KERNELS:
            kernel = getattr(module, name)

            def noting(*arguments, kernel=kernel):
                calls.append((kernel, tuple(a.copy() if isinstance(a, np.ndarray) else a for a in arguments)))
                return kernel(*arguments)

            patch.setattr(module, name, noting)
        for policy in ("even", "exact"):
            sent_DED = sent_by_all(plan_dispatch(policy, counts_DE, placement, topology))
        of_quotas = quota_planner.quota_dispatch(sent_DED.sum(axis=0), counts_DE, topology)
        of_quotas.sums()
        of_quotas.rows_from(seed % placement.num_devices)
    for kernel, arguments in calls:
        plain, compiled = answers_of_both_forms(kernel, arguments)
        if kernel is quota_dispatch.quota_row:  # entries after the last chunk have no meaning
            plain, compiled = (
                [*answer[:7], *(a[: answer[0]] for a in answer[7:10])] for answer in (plain, compiled)
            )
        assert plain == compiled, kernel.plain.__name__
