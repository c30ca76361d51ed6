"""Experts that two ranks share equal the reference layer with whole experts.

Shape letters: T tokens of all ranks, M model dim, F ffn dim, E experts, D devices, X peers.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fssdp.planning.cost.tensor_schedules import Schedule
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.exchange.exchange_selection import exchange_of
from megatron_fssdp.runtime.exchange.expert_groups import ExpertGroups
from megatron_fssdp.runtime.execution.layer_executor import LayerExecutor
from megatron_fssdp.runtime.execution.layer_pass import run_layer
from megatron_fssdp.runtime.execution.moe_runtime import MoERuntime
from megatron_fssdp.runtime.experts.grouped_ffn import grouped_ffn
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.testing import run_ranks

from ..drawn_placements import DrawnPlacements
from ..layer_case import ACTIVATIONS, FFN_DIM, MODEL_DIM, Inputs, LayerCase, draw_inputs
from ..reference_layer import draw_weights, reference_forward

PEERS = 2
TOLERANCE = 1e-10  # fp64, relative to the largest value of each tensor


@dataclass
class Found:
    """One rank's largest relative error, its placements and its loads."""

    error: float
    digests: list[bytes]
    num_replicas: list[int]
    counts: list[np.ndarray]
    device_tokens: list[int]


def shard(tensors: list[Tensor], activation: str, peer: int) -> list[Tensor]:
    """A peer's part of fc1 and fc2; the two halves of a gated fc1 are cut separately."""
    fc1, fc2 = tensors
    halves = fc1.chunk(fc1.shape[0] // FFN_DIM)
    assert activation in ("gelu", "swiglu")
    return [torch.cat([half.chunk(PEERS)[peer] for half in halves]), fc2.chunk(PEERS, dim=1)[peer]]


def forward(
    executor: LayerExecutor,
    hidden: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    name: str,
    schedule: Schedule = "megatron",
) -> Tensor:
    """The layer's forward pass under a schedule."""
    executor.plan_iteration()
    compute = partial(grouped_ffn, activation=ACTIVATIONS[name])
    exchange = exchange_of(schedule, executor.groups)
    output, _ = run_layer(executor, hidden, probs, routing_map, compute, exchange=exchange)
    return output


def compare(rank: int, world_size: int, case: LayerCase, schedule: Schedule) -> Found:
    """Run some iterations with new placements; ranks are numbered as in Megatron, peers first."""
    num_devices, peer = world_size // PEERS, rank % PEERS
    device_groups = [dist.new_group(list(range(x, world_size, PEERS))) for x in range(PEERS)]
    peer_groups = [dist.new_group([PEERS * d + x for x in range(PEERS)]) for d in range(num_devices)]
    topology = Topology.uniform(num_devices, case.num_nodes)
    groups = ExpertGroups(
        device_groups[peer],
        topology,
        expert_tensor_parallel=peer_groups[rank // PEERS],
        parts=dist.new_group(list(range(world_size))),
    )
    owner_E = even_owners(case.num_experts, num_devices)
    weights = draw_weights(case.seed, case.num_experts, MODEL_DIM, FFN_DIM, case.activation, False)
    weights = [[tensor.requires_grad_() for tensor in tensors] for tensors in weights]
    parameters = {
        int(e): [torch.nn.Parameter(t.detach().clone()) for t in shard(weights[e], case.activation, peer)]
        for e in np.flatnonzero(owner_E == groups.device)
    }
    runtime = MoERuntime(DrawnPlacements(case), measure=True, check_plans=True)
    executor = runtime.add_layer(LayerContext(1, owner_E, topology), groups, parameters)
    rng = np.random.default_rng(case.seed)
    found = Found(0.0, [], [], [], [])
    for _ in range(case.num_iterations):
        batch = draw_inputs(case, owner_E, world_size, rng)
        runtime.begin_iteration()
        plan = executor.plan_iteration()
        found.digests.append(plan.placement.digest())
        found.num_replicas.append(plan.placement.num_replicas)
        _compare_iteration(executor, case, batch, weights, rank, found, schedule)
        load = runtime.end_iteration()[0]
        found.counts.append(load.counts_DE)
        found.device_tokens.append(int(load.device_D.sum()))
        for tensor in [t for tensors in (*weights, *parameters.values()) for t in tensors]:
            tensor.grad = None
    return found


def _compare_iteration(
    executor: LayerExecutor,
    case: LayerCase,
    batch: Inputs,
    weights: list[list[Tensor]],
    rank: int,
    found: Found,
    schedule: Schedule,
) -> None:
    hidden = batch.of_rank(batch.hidden, rank).clone().requires_grad_()
    probs = batch.of_rank(batch.probs, rank).clone().requires_grad_()
    routing_map = batch.of_rank(batch.routing_map, rank)
    output = forward(executor, hidden, probs, routing_map, case.activation, schedule)
    (output * batch.of_rank(batch.cotangent, rank)).sum().backward()

    all_hidden, all_probs = batch.hidden.clone().requires_grad_(), batch.probs.clone().requires_grad_()
    wanted = reference_forward(all_hidden, all_probs, batch.routing_map, weights, case.activation)
    (wanted * batch.cotangent).sum().backward()
    pairs = [
        (output, batch.of_rank(wanted, rank)),
        (hidden.grad, batch.of_rank(all_hidden.grad, rank)),
        (probs.grad, batch.of_rank(all_probs.grad, rank)),
    ]
    for expert, tensors in executor.experts.parameters.items():
        gradients = shard([t.grad for t in weights[expert]], case.activation, executor.groups.peer)
        pairs += [(p.grad, gradient) for p, gradient in zip(tensors, gradients, strict=True)]
    for got, right in pairs:
        if right.numel():
            assert got is not None
            assert got.shape == right.shape
            scale = max(float(right.abs().max()), 1e-6)
            found.error = max(found.error, float((got - right).abs().max()) / scale)


CASES = [
    LayerCase("swiglu-random"),
    LayerCase("gelu-everywhere-two-nodes", activation="gelu", placement="everywhere", num_nodes=2),
    LayerCase("owners", placement="owners"),
    LayerCase("replicas-only-dropped", placement="replicas_only", routing="dropped", num_iterations=4),
    LayerCase("a-peer-without-tokens", tokens=(5, 0, 7, 4)),
]


@pytest.mark.parametrize("schedule", ["megatron", "s1", "baseline"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_experts_split_over_devices_equal_whole_ones(case: LayerCase, schedule: Schedule) -> None:
    results = run_ranks(compare, 4, case, schedule)
    for found in results:
        assert found.error <= TOLERANCE
        assert found.digests == results[0].digests
        assert all(map(np.array_equal, found.counts, results[0].counts)), (
            "every token counts once over all ranks"
        )
    assert any(results[0].num_replicas) == (case.placement != "owners")
    assert results[0].device_tokens == [int(counts.sum()) for counts in results[0].counts]
