"""Tokens that travel once to each node and device give the stock layer's results and gradients."""

import pytest
import torch

from megatron_fssdp.dispatchers.deduplicated import DeduplicatedTokenDispatcher, _Copies
from megatron_fssdp.planning.placement.topology import Topology

from .slot_layers import (
    BF16,
    OVERLAP,
    PADDED,
    RECOMPUTE,
    SHARED,
    TOP1,
    TOP4,
    SlotCase,
    compare,
    run_layer_ranks,
)

DROPPING = {"moe_expert_capacity_factor": 0.7}
NO_DROPS = {"moe_expert_capacity_factor": 8.0}

WHOLE = {
    "2 nodes of 2": SlotCase(),
    "1 node, top-4": SlotCase(TOP4, nodes=(0, 0, 0, 0)),
    "4 nodes": SlotCase(TOP4, nodes=(0, 1, 2, 3)),
    "uneven nodes": SlotCase(TOP4, nodes=(0, 1, 1, 1)),
    "other uneven nodes": SlotCase(nodes=(0, 0, 0, 1)),
    "nodes that alternate, top-1": SlotCase(TOP1, nodes=(0, 1, 0, 1)),
    "all experts": SlotCase({"moe_router_topk": 8}),
    "empty slots, skewed": SlotCase(TOP4, replicas=False, skew=2.0),
    "one expert on a device": SlotCase({"num_experts": 4}),
    "ranks without rows": SlotCase(NO_DROPS, tokens=(5, 9, 1, 12), silent=(1, 2)),
    "nobody has rows": SlotCase(NO_DROPS, silent=(0, 1, 2, 3)),
    "capacity": SlotCase({**DROPPING, **TOP4}, skew=1.0),
    "capacity, padded": SlotCase(PADDED, most_choices=8),
    "recomputed": SlotCase(RECOMPUTE),
    "shared experts": SlotCase(SHARED),
    "shared experts, overlapped, recomputed": SlotCase({**OVERLAP, **RECOMPUTE}),
    "segments": SlotCase(TOP4, segments=True),
    "segments, 1 node": SlotCase(nodes=(0, 0, 0, 0), segments=True),
    "double probabilities": SlotCase({"moe_router_dtype": "fp64", **TOP4}),
    "bf16": SlotCase({**BF16, **TOP4}),
}
PARTS = {
    "2 nodes": SlotCase(TOP4, nodes=(0, 1)),
    "1 node, capacity": SlotCase(DROPPING, nodes=(0, 0), skew=1.0),
    "overlapped shared experts": SlotCase(OVERLAP, nodes=(0, 1)),
    "segments": SlotCase(TOP4, nodes=(0, 0), segments=True),
}
ONE_DEVICE = {
    "dropped": SlotCase(DROPPING, nodes=(0,), skew=1.0),
    "top-4": SlotCase(TOP4, nodes=(0,)),
}
GROUPS: list[tuple[int, dict[str, SlotCase], dict[str, int]]] = [
    (4, WHOLE, {"ep": 4}),
    (4, PARTS, {"tp": 2, "ep": 2, "etp": 2}),
    (4, {"tensor parallelism": SlotCase(nodes=(0, 0, 1, 1))}, {"tp": 2, "ep": 4, "etp": 1}),
    (2, ONE_DEVICE, {"tp": 2, "ep": 1, "etp": 2}),
]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: "-".join(group[2]))
def test_layers_equal_the_stock_layer(group: tuple[int, dict[str, SlotCase], dict[str, int]]) -> None:
    world_size, cases, sizes = group
    results = run_layer_ranks(compare, world_size, cases, **sizes)
    for name, case in cases.items():
        tolerance = 2e-2 if "bf16" in case.config else 1e-6
        for of_rank in results:
            result = of_rank[name]
            assert {"output", "input", "router.weight"} < set(result.errors)
            assert max(result.errors.values()) < tolerance, (name, result.errors)
            assert result.sent[0] == result.distinct[0], "once to each other node"
        sent, distinct = zip(
            *((of_rank[name].sent, of_rank[name].distinct) for of_rank in results), strict=True
        )
        assert sum(last for _, last in sent) == sum(devices for _, devices in distinct), "once to each device"


def test_rows_of_bf16_are_summed_in_fp32() -> None:
    copies = _Copies(torch.zeros(257, dtype=torch.int64), 2)
    rows = torch.ones(257, 1, dtype=torch.bfloat16)
    rows[0] = 256.0
    assert copies.sum(rows).tolist() == [[512.0], [0.0]]
    token = torch.ones(2, 1, dtype=torch.bfloat16, requires_grad=True)
    copies.spread(token).backward(rows)
    assert token.grad is not None
    assert token.grad.tolist() == [[512.0], [0.0]]


def test_settings_that_do_not_fit_are_refused() -> None:
    for messages in run_layer_ranks(_refusals, 2, ep=2):
        assert "the topology has 3 devices: wanted 2" in messages[0]
        assert "moe_preprocess" in messages[1]
        assert "more slots than their rows have room for: wanted at most 2" in messages[2]


def _refusals(rank: int, world_size: int) -> list[str]:
    from megatron.core.transformer.enums import CudaGraphModule
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from ..megatron_adapter.layer.small_config import moe_config

    graph = {"cuda_graph_impl": "local", "cuda_graph_modules": [CudaGraphModule.moe_preprocess]}
    messages = []
    for nodes, settings in (((0, 0, 1), {}), ((0, 1), graph), ((0, 1), {})):
        config = moe_config(2, 8, 4)
        vars(config).update(settings)
        with pytest.raises((ValueError, RuntimeError)) as error:  # noqa: PT012
            dispatcher = DeduplicatedTokenDispatcher(
                2, [2 * rank, 2 * rank + 1], config, get_default_pg_collection(), topology=Topology(nodes)
            )
            map_of_all = torch.ones(3, 4, dtype=torch.bool)
            dispatcher.dispatch_preprocess(torch.ones(3, 1, 8), map_of_all, torch.ones(3, 4))
        messages.append(str(error.value))
    return messages
