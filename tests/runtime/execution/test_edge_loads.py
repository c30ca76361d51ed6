"""Under extreme loads and owners, layers equal the reference and no rank waits forever."""

import pytest
import torch

from megatron_fssdp.testing import run_ranks

from ..layer_case import LayerCase
from ..rank_layer import compare_with_reference

NOBODY = (0, 0, 1, 1, 2, 2, 0, 1)  # owners of eight experts; rank 3 owns none

CASES = [
    *(
        LayerCase(f"all-on-one-expert-{placement}-top{k}", placement=placement, routing="one_expert", top_k=k)
        for placement in ("owners", "random", "everywhere", "fssdp")
        for k in (1, 2)
    ),
    LayerCase("all-on-one-device", placement="owners", routing="one_device"),
    LayerCase("all-on-one-device-fssdp", placement="fssdp", routing="one_device", num_iterations=3),
    LayerCase("fewer-tokens-than-devices", tokens=(1, 0, 0, 2)),
    LayerCase("fewer-tokens-than-devices-owners", tokens=(0, 1, 0, 0), placement="owners", biases=True),
    LayerCase("fewer-tokens-than-devices-fssdp", tokens=(0, 0, 3, 0), placement="fssdp", num_iterations=4),
    LayerCase("one-token-everywhere", tokens=(1, 0, 0, 0), placement="everywhere", top_k=1),
    LayerCase("no-tokens", tokens=(0, 0, 0, 0), biases=True),
    LayerCase("no-tokens-fssdp", tokens=(0, 0, 0, 0), placement="fssdp"),
    LayerCase("one-expert-a-device", num_experts=4, num_nodes=2, placement="fssdp", num_iterations=3),
    LayerCase("one-expert-a-device-top1", num_experts=4, top_k=1, placement="random"),
    LayerCase("fewer-experts-than-devices", num_experts=2, owners=(2, 1), top_k=1),
    *(
        LayerCase(
            f"{placement}-{schedule}-{recompute or 'kept'}-{activation}",
            placement=placement,
            owners=NOBODY,
            schedule=schedule,
            recompute=recompute,
            activation=activation,
            biases=activation == "interleaved_swiglu",
            probs_on_input=schedule == "FB",
            top_k=1 if schedule == "FB" else 2,
        )
        for placement in ("replicas_only", "nowhere_else")
        for schedule, recompute, activation in (
            ("FB", None, "interleaved_swiglu"),
            ("FFBB", None, "swiglu"),
            ("FFBB", "reentrant", "gelu"),
            ("FFBB", "non_reentrant", "swiglu"),
        )
    ),
    LayerCase("owns-nothing-fssdp", owners=NOBODY, placement="fssdp", num_nodes=2, num_iterations=3),
    LayerCase("owns-nothing-ep", owners=NOBODY, placement="ep"),
    LayerCase("owns-nothing-without-gradients", owners=NOBODY, placement="nowhere_else", inputs=()),
    LayerCase("one-owner", owners=(2,) * 8, placement="owners", num_nodes=2),
    LayerCase("one-owner-random", owners=(2,) * 8, num_nodes=2),
]
ALONE = [
    LayerCase("alone", placement="owners", biases=True, schedule="FFBB"),
    LayerCase("alone-fssdp", placement="fssdp", num_iterations=3),
    LayerCase("alone-undriven", placement="fssdp", driven=False),
    LayerCase("alone-reentrant", placement="ep", recompute="reentrant"),
    LayerCase("alone-non-reentrant", placement="ep", recompute="non_reentrant", inputs=("hidden",)),
    LayerCase("alone-without-tokens", placement="ep", tokens=(0,)),
    LayerCase("alone-bf16", placement="ep", dtype=torch.bfloat16),
]


@pytest.mark.parametrize(("world_size", "cases"), [(4, CASES), (1, ALONE)], ids=["four-ranks", "one-rank"])
def test_the_layer_equals_the_reference_and_does_not_hang(world_size: int, cases: list[LayerCase]) -> None:
    results = run_ranks(compare_with_reference, world_size, cases, timeout_s=60)
    for case in cases:
        limit = 3e-2 if case.dtype is torch.bfloat16 else 1e-10
        for rank, of_case in enumerate(results):
            errors = of_case[case.name].errors
            assert errors, f"{case.name}, rank {rank}: nothing was compared"
            assert all(error <= limit for error in errors.values()), f"{case.name}, rank {rank}: {errors}"
        if case.placement == "replicas_only":
            assert all(results[3][case.name].num_present), case.name
        elif case.placement == "nowhere_else":
            assert not any(results[3][case.name].num_present), case.name
