"""The layer executor alone equals a reference layer: outputs, and gradients of inputs, probs and parameters.

Neither Megatron nor a router takes part: each case draws its routing. Megatron's whole layer, with its
router, is compared in ``tests/megatron_adapter/layer/test_megatron_layer_parity.py``.
"""

import functools

import pytest
import torch

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.testing import RankError, run_ranks

from ..layer_case import CaseResult, LayerCase
from ..rank_layer import compare_with_reference

# Relative to the largest value of each tensor.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}
NAMES = [name for name in STRATEGIES if name != "none"]

CASES_2 = (
    [
        LayerCase(f"{activation}-{biases=}", activation=activation, biases=biases, num_experts=4)
        for activation in ("gelu", "relu", "squared_relu", "swiglu", "clamped_geglu", "interleaved_swiglu")
        for biases in (False, True)
    ]
    + [
        LayerCase(f"top{k}-{num_experts}-experts", top_k=k, num_experts=num_experts)
        for k in (1, 2, 4)
        for num_experts in (4, 16)
    ]
    + [
        LayerCase("probs-on-input", top_k=1, probs_on_input=True),
        LayerCase("probs-on-input-biases", top_k=1, probs_on_input=True, biases=True, activation="gelu"),
        LayerCase("two-nodes", num_nodes=2),
        LayerCase("reentrant-recompute", recompute="reentrant", schedule="FBFB"),
        LayerCase("non-reentrant-recompute", recompute="non_reentrant", schedule="FBFB"),
        LayerCase("one-expert-a-device", num_experts=2, top_k=1, placement="owners"),
        LayerCase("one-device-owns-all", owners=(1,) * 8),
    ]
)
CASES_4 = (
    [
        LayerCase(f"{placement}-{num_nodes}-nodes", placement=placement, num_nodes=num_nodes, biases=True)
        for placement in ("owners", "random", "everywhere")
        for num_nodes in (1, 2)
    ]
    + [
        LayerCase(
            f"{name}-{schedule}-{num_nodes}-nodes",
            placement=name,
            num_nodes=num_nodes,
            schedule=schedule,
            num_iterations=5,
        )
        for name in NAMES
        for schedule, num_nodes in (("FB", 2), ("FFBB", 1))
    ]
    + [
        LayerCase(
            "fssdp-undriven", placement="fssdp", settings=(("slots", 2),), driven=False, num_iterations=5
        ),
        LayerCase("fssdp-undriven-pipeline", placement="fssdp", schedule="FFBB", driven=False),
        LayerCase(
            "fssdp-undriven-reentrant",
            placement="fssdp",
            schedule="FFBB",
            recompute="reentrant",
            driven=False,
            num_iterations=4,
        ),
        LayerCase("pipeline", schedule="FFBFBB"),
        LayerCase("pipeline-reentrant", schedule="FFBB", recompute="reentrant", num_nodes=2),
        LayerCase("pipeline-non-reentrant", schedule="FFBB", recompute="non_reentrant", num_nodes=2),
        LayerCase("dropped", routing="dropped"),
        LayerCase("dropped-top4", routing="dropped", top_k=4, num_experts=16, num_nodes=2),
        LayerCase("hidden-without-gradient", inputs=("probs",)),
        LayerCase("probs-without-gradient", inputs=("hidden",)),
        LayerCase("parameters-only", inputs=(), biases=True),
        LayerCase("top1-16-experts", top_k=1, num_experts=16, num_nodes=2, placement="everywhere"),
        LayerCase("top4-16-experts", top_k=4, num_experts=16),
        LayerCase("uneven-owners", owners=(2, 2, 2, 0, 1, 2, 3, 1), num_nodes=2),
        LayerCase("fp32", dtype=torch.float32, biases=True, num_nodes=2),
        LayerCase("bf16", dtype=torch.bfloat16, biases=True),
        LayerCase("resident", transfers="resident", num_nodes=2, biases=True),
        LayerCase("resident-micro-batches", transfers="resident", schedule="FBFFBB", num_nodes=2),
        LayerCase("resident-everywhere", transfers="resident", placement="everywhere", schedule="FFBB"),
        LayerCase("resident-recomputed", transfers="resident", schedule="FFBB", recompute="reentrant"),
        LayerCase("resident-smart-schedule", transfers="resident", schedule="FB", group_size=2, num_nodes=2),
        LayerCase("resident-in-turn", transfers="resident_in_turn", schedule="FBFB", dtype=torch.float32),
        LayerCase("resident-bf16", transfers="resident", dtype=torch.bfloat16, schedule="FBFB"),
        LayerCase(
            "resident-dropped", transfers="resident", routing="dropped", owners=(0, 0, 2, 2, 2, 3, 3, 0)
        ),
    ]
)
CASES_8 = [LayerCase("eight-ranks", num_experts=16, top_k=4, num_nodes=2, schedule="FFBB", biases=True)]
CASES = {2: CASES_2, 4: CASES_4, 8: CASES_8}


@functools.cache
def outcome(world_size: int) -> list[dict[str, CaseResult]] | RankError:
    """Results of all cases from one start of the ranks; an error is kept as well."""
    try:
        return run_ranks(compare_with_reference, world_size, CASES[world_size], timeout_s=120)
    except RankError as error:
        return error


def results_of(world_size: int, case: LayerCase) -> list[CaseResult]:
    results = outcome(world_size)
    if isinstance(results, RankError):
        raise results
    return [of_case[case.name] for of_case in results]


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        pytest.param(world_size, case, id=f"{world_size}-ranks-{case.name}")
        for world_size, cases in CASES.items()
        for case in cases
    ],
)
def test_the_executor_equals_the_reference(world_size: int, case: LayerCase) -> None:
    quantities = {"output"}
    for rank, result in enumerate(results_of(world_size, case)):
        quantities |= set(result.errors)
        worst = max(result.errors, key=result.errors.__getitem__)
        assert result.errors[worst] <= TOLERANCE[case.dtype], f"{worst} on rank {rank}"
    assert quantities >= {f"{name} gradient" for name in case.inputs}
    assert quantities >= {f"parameter {i} gradient" for i in range(4 if case.biases else 2)}


@pytest.mark.parametrize("case", CASES_4, ids=lambda case: case.name)
def test_every_case_has_the_replicas_that_it_is_meant_to_test(case: LayerCase) -> None:
    results = results_of(4, case)
    for result in results:
        assert result.digests == results[0].digests
    num_replicas, digests = results[0].num_replicas, results[0].digests
    if case.placement == "fssdp":
        assert num_replicas[0] == 0
        assert all(num_replicas[1:])
        assert len(set(digests)) > min(2, len(digests) - 1), "the placement never changed"
    elif case.placement in ("owners", "ep"):
        assert not any(num_replicas)
    elif case.placement in ("random", "everywhere"):
        assert all(num_replicas)
