"""Tokens that travel once to each node and device give the stock layer's results and gradients."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fssdp.dispatchers.deduplicated import (
    DeduplicatedTokenDispatcher,
    _Copies,
    _tokens_by_destination,
)
from megatron_fssdp.planning.placement.topology import Topology

from .slot_layers import OVERLAP, RECOMPUTE, SHARED, TOP1, SlotCase, compare, run_layer_ranks

TOP4 = {"moe_router_topk": 4}
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}

WHOLE = {
    "2 nodes of 2": SlotCase(),
    "1 node, top-4": SlotCase(nodes=(0, 0, 0, 0), config=TOP4),
    "4 nodes": SlotCase(nodes=(0, 1, 2, 3), config=TOP4),
    "uneven nodes": SlotCase(nodes=(0, 1, 1, 1), config=TOP4),
    "other uneven nodes": SlotCase(nodes=(0, 0, 0, 1)),
    "nodes that alternate, top-1": SlotCase(nodes=(0, 1, 0, 1), config=TOP1),
    "all experts": SlotCase(config={"moe_router_topk": 8}),
    "empty slots, skewed": SlotCase(replicas=False, skew=2.0, config=TOP4),
    "one expert on a device": SlotCase(config={"num_experts": 4}),
    "ranks without rows": SlotCase(
        tokens=(5, 9, 1, 12), silent=(1, 2), config={"moe_expert_capacity_factor": 8.0}
    ),
    "nobody has rows": SlotCase(silent=(0, 1, 2, 3), config={"moe_expert_capacity_factor": 8.0}),
    "capacity": SlotCase(skew=1.0, config={"moe_expert_capacity_factor": 0.7, **TOP4}),
    "capacity, padded": SlotCase(config=PADDED, options={"most_choices": 8}),
    "recomputed": SlotCase(config=RECOMPUTE),
    "shared experts": SlotCase(config=SHARED),
    "shared experts, overlapped, recomputed": SlotCase(config={**OVERLAP, **RECOMPUTE}),
    "segments": SlotCase(segments=True, config=TOP4),
    "segments, 1 node": SlotCase(nodes=(0, 0, 0, 0), segments=True),
    "double probabilities": SlotCase(config={"moe_router_dtype": "fp64", **TOP4}),
    "bf16": SlotCase(config={"bf16": True, "params_dtype": torch.bfloat16, **TOP4}),
}
PARTS = {
    "2 nodes": SlotCase(nodes=(0, 1), config=TOP4),
    "1 node, capacity": SlotCase(nodes=(0, 0), skew=1.0, config={"moe_expert_capacity_factor": 0.7}),
    "overlapped shared experts": SlotCase(nodes=(0, 1), config=OVERLAP),
    "segments": SlotCase(nodes=(0, 0), segments=True, config=TOP4),
}
ONE_DEVICE = {
    "dropped": SlotCase(nodes=(0,), skew=1.0, config={"moe_expert_capacity_factor": 0.7}),
    "top-4": SlotCase(nodes=(0,), config=TOP4),
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


def test_payloads_keep_slots_and_probabilities() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        dispatcher: Any = SimpleNamespace(num_experts=6, _num_choices=3)
        slot_TK = torch.tensor([[0, 3, 5], [2, 6, 6], [6, 6, 6]])
        probs = torch.rand(3, 6, dtype=torch.float64).to(dtype).requires_grad_()
        payload = DeduplicatedTokenDispatcher._payload(dispatcher, slot_TK, probs)
        assert torch.equal(DeduplicatedTokenDispatcher._slots_of(dispatcher, payload), slot_TK)
        got = payload[:, :3].to(dtype)
        assert torch.equal(got[0], probs[0, [0, 3, 5]])
        assert got[1, 0] == probs[1, 2]
        assert not got[1, 1:].any()
        assert not got[2].any()
        payload[:, :3].sum().backward()
        assert probs.grad is not None
        assert probs.grad.sum() == 4


def test_choices_are_the_slots_of_the_map() -> None:
    routing_map = torch.rand(50, 12, generator=torch.Generator().manual_seed(1)) < 0.2
    dispatcher: Any = SimpleNamespace(num_experts=12, _num_choices=int(routing_map.sum(dim=1).max()))
    choices = DeduplicatedTokenDispatcher._choices(dispatcher, routing_map)
    for chosen, row in zip(choices.tolist(), routing_map, strict=True):
        assert [slot for slot in chosen if slot < 12] == row.nonzero().view(-1).tolist()
    assert DeduplicatedTokenDispatcher._choices(dispatcher, routing_map[:0]).shape == (0, choices.shape[1])


def test_tokens_come_by_destination() -> None:
    hit_TD = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 0, 0]], dtype=torch.bool)
    assert _tokens_by_destination(hit_TD)[:4].tolist() == [0, 2, 0, 1]
    assert _tokens_by_destination(hit_TD[:0]).tolist() == []


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

    messages = []

    def build(topology: Topology, **settings: Any) -> Any:
        config = moe_config(2, 8, 4)
        vars(config).update(settings)
        slots = [2 * rank, 2 * rank + 1]
        return DeduplicatedTokenDispatcher(2, slots, config, get_default_pg_collection(), topology=topology)

    for topology, settings in (
        (Topology((0, 0, 1)), {}),
        (
            Topology((0, 1)),
            {"cuda_graph_impl": "local", "cuda_graph_modules": [CudaGraphModule.moe_preprocess]},
        ),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            build(topology, **settings)
        messages.append(str(error.value))
    dispatcher = build(Topology((0, 1)))
    with pytest.raises(RuntimeError) as overflow:  # noqa: PT011
        dispatcher.dispatch_preprocess(
            torch.ones(3, 1, 8), torch.ones(3, 4, dtype=torch.bool), torch.ones(3, 4)
        )
    return [*messages, str(overflow.value)]
