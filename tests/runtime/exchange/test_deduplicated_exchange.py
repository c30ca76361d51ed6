"""A layer with the deduplicated exchange has the results and gradients of the reference layer."""

import functools

import pytest
import torch

from megatron_fssdp.testing import run_ranks

from ..layer_case import CaseResult, LayerCase
from ..rank_layer import compare_with_reference

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}

MANY = [
    LayerCase(
        f"deduplicated-top{top_k}-{num_nodes}-nodes-{placement}",
        top_k=top_k,
        num_experts=16,
        num_nodes=num_nodes,
        placement=placement,
        deduplicated="known",
    )
    for top_k, placement in ((1, "random"), (2, "owners"), (4, "everywhere"), (8, "random"))
    for num_nodes in (1, 2, 4)
] + [
    LayerCase("deduplicated-parameters", inputs=(), num_nodes=2, deduplicated="known"),
    LayerCase("deduplicated-non-reentrant", recompute="non_reentrant", num_nodes=2, deduplicated="known"),
    LayerCase("deduplicated-fp32", dtype=torch.float32, top_k=4, num_nodes=2, deduplicated="known"),
    LayerCase("deduplicated-rematerialized", transfers="rematerialized", num_nodes=2, deduplicated="known"),
    LayerCase("deduplicated-once", transfers="once", schedule="FFBB", num_nodes=2, deduplicated="known"),
    LayerCase("deduplicated-hidden", inputs=("hidden",), num_nodes=2, deduplicated="known"),
    LayerCase("deduplicated-probs", inputs=("probs",), num_nodes=2, deduplicated="known"),
]
SOME = [
    LayerCase("deduplicated", top_k=4, num_experts=16, num_nodes=2, deduplicated="known"),
    LayerCase("deduplicated-one-node", top_k=4, num_experts=16, deduplicated="known"),
    LayerCase("deduplicated-four-nodes", top_k=4, num_experts=16, num_nodes=4, deduplicated="known"),
    LayerCase("deduplicated-unknown", top_k=4, num_nodes=2, deduplicated="unknown"),
    LayerCase("deduplicated-dropped", top_k=4, routing="dropped", num_nodes=2, deduplicated="known"),
    LayerCase("deduplicated-one-device", routing="one_device", num_nodes=2, deduplicated="known"),
    LayerCase("deduplicated-no-tokens", tokens=(5, 0, 3, 0), num_nodes=2, deduplicated="known"),
    LayerCase("deduplicated-pipeline", schedule="FFBFBB", num_nodes=2, deduplicated="known"),
    LayerCase(
        "deduplicated-recomputed", recompute="reentrant", schedule="FFBB", num_nodes=2, deduplicated="known"
    ),
    LayerCase("deduplicated-kept", recompute="kept", schedule="FFBB", num_nodes=2, deduplicated="known"),
    LayerCase(
        "deduplicated-each", transfers="each", schedule="FFBB", num_nodes=2, top_k=4, deduplicated="known"
    ),
    LayerCase("deduplicated-rematerialized", transfers="rematerialized", num_nodes=2, deduplicated="known"),
    LayerCase("deduplicated-bf16", dtype=torch.bfloat16, top_k=4, num_nodes=2, deduplicated="known"),
]
# The first iteration has no forecast, so the exchange changes between the iterations.
BY_PRICE = [
    LayerCase(
        f"by-price-{name}",
        placement=name,
        settings=(("slots", 2),) if name == "fssdp" else (),
        top_k=4,
        num_experts=16,
        num_nodes=2,
        schedule="FFBB",
        num_iterations=3,
        deduplicated="by_price",
    )
    for name in ("ep", "fssdp")
]
SOME += BY_PRICE


@functools.cache
def results(are_many: bool) -> list[dict[str, CaseResult]]:
    return run_ranks(compare_with_reference, 4, MANY if are_many else SOME)


def check(case: LayerCase, of_ranks: list[dict[str, CaseResult]]) -> None:
    for of_rank in of_ranks:
        errors = of_rank[case.name].errors
        assert errors
        assert max(errors.values()) < TOLERANCE[case.dtype], errors


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_a_layer_equals_the_reference(case: LayerCase) -> None:
    check(case, results(False))


@pytest.mark.parametrize("case", BY_PRICE, ids=lambda case: case.name)
def test_all_ranks_change_the_exchange_alike(case: LayerCase) -> None:
    """The ranks also compare their plans (``check_plans``)."""
    for of_rank in results(False):
        assert of_rank[case.name].deduplicated == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY, ids=lambda case: case.name)
def test_more_layers_equal_the_reference(case: LayerCase) -> None:
    check(case, results(True))
