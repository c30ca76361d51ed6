"""The exchange in steps gives what the exchange with all at once gives: the reference's numbers."""

from dataclasses import replace

from megatron_fssdp.testing import run_ranks

from .rank_layer import compare_with_reference
from .test_materialization import CASES, TOLERANCE

PIPELINED = [
    replace(case, name=f"{case.name}-by-{group_size}", group_size=group_size)
    for case, group_size in zip(CASES, [1, 2, 4] * len(CASES), strict=False)
]


def test_equals_the_reference() -> None:
    results = run_ranks(compare_with_reference, 4, PIPELINED, timeout_s=180)
    for case in PIPELINED:
        for result in (of_rank[case.name] for of_rank in results):
            worst = max(result.errors.values())
            assert worst <= TOLERANCE[case.dtype], (case.name, result.errors)
