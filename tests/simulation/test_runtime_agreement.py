"""The simulator's plans and device loads equal those of the runtime on the same counts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_fssdp.config.strategy.strategy_selection import strategy_settings
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.runtime.execution.layer_executor import LayerExecutor, MicroBatch
from megatron_fssdp.simulation.replay import replay_strategy
from megatron_fssdp.strategies.layer_plan import LayerPlan
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.testing import run_ranks
from tests.runtime.layer_case import ACTIVATIONS
from tests.runtime.one_layer import one_layer
from tests.runtime.rank_layer import moe_forward

NUM_EXPERTS, NUM_TOKENS, NUM_ITERATIONS, WORLD = 8, 64, 6, 4
LINK = LinkCost(0.0, 1e-9)
PROFILE = LayerProfile(1e-6, ClusterCost(LINK, LINK, 1e4), 300, 100, 50.0, 3)
# Split evenly, because balanced and unbound dispatch make other replicas after the gate unnecessary here.
BY_PRICE = {"slots": 2, "profile_iterations": 2, "reshard_interval": 0, "dispatch_policy": "even"}
CASES = [
    ("ep", {}),
    ("fssdp", {"slots": 2, "overlap_degree": 4}),
    ("fssdp", {"planner": "hecate", "window": 2}),
    ("fssdp", {"slots": 2, "overlap_degree": 3, "calibrate": True, "profile_iterations": 2}),
    ("fssdp", {"slots": 2, "overlap_degree": 4, "dispatch_policy": "balanced"}),
    ("fssdp", {"slots": 2, "overlap_degree": 4, "dispatch_policy": "unbound"}),
    ("fssdp", BY_PRICE),
    ("fssdp", {**BY_PRICE, "dispatch_policy": None}),
    ("fastermoe", {"profile_iterations": 2}),
    ("prophet", {"profile_iterations": 2, "plan_interval": 2, "left_out": 1}),
    ("quota", {"profile_iterations": 2, "slots": 2}),
    ("flexmoe", {"profile_iterations": 2, "slots": 2, "placement_interval": 3, "window": 3}),
]


def noting(begin: Callable[..., MicroBatch], used: list[LayerPlan], *arguments: Any) -> MicroBatch:
    micro_batch = begin(*arguments)
    used.append(micro_batch.plan)
    return micro_batch


def keep(executor: LayerExecutor, placement: ExpertPlacement) -> None:
    """resident replicas, with Parameters of whatever contents."""
    example = next(iter(executor.experts.parameters.values()))
    here = [e for e in placement.experts_on(executor.groups.device) if e not in executor.experts.parameters]
    executor.keep(placement, {e: [torch.nn.Parameter(torch.zeros_like(p)) for p in example] for e in here})


def run_layers(rank: int, world_size: int) -> list[list[tuple[bytes, np.ndarray, np.ndarray]]]:
    """Digest, counts and device loads of every iteration of each case."""
    found = []
    for name, keys in CASES:
        strategy = build_strategy(name, strategy_settings(name, keys, "test"))
        topology = Topology.uniform(world_size, 2)
        runtime, executor = one_layer(strategy, NUM_EXPERTS, topology, rank)
        used: list[LayerPlan] = []
        executor.begin_micro_batch = partial(noting, executor.begin_micro_batch, used)
        rng = np.random.default_rng(rank)
        iterations = []
        for iteration in range(NUM_ITERATIONS):
            if iteration == strategy.profile_iterations and iteration:
                executor.context = replace(executor.context, profile=PROFILE)
            if strategy.resident_slots and strategy.replicates_at(iteration):
                keep(executor, strategy.replicate(executor.context, executor.history.mean_DE()))
            runtime.begin_iteration(1 if strategy.resident_slots else None)
            # The popular experts change in the middle of the run.
            score_TE = rng.gumbel(size=(NUM_TOKENS, NUM_EXPERTS))
            score_TE[:, (0, 1) if iteration < 4 else (5, 6)] += 2
            routing_TE = np.zeros(score_TE.shape, bool)
            np.put_along_axis(routing_TE, np.argsort(-score_TE, axis=1)[:, :2], True, axis=1)
            hidden, probs = torch.ones(NUM_TOKENS, 2), torch.ones(NUM_TOKENS, NUM_EXPERTS)
            routing_map = torch.from_numpy(routing_TE)
            output = moe_forward(executor, hidden, probs, routing_map, ACTIVATIONS["relu"])
            output.sum().backward()
            runtime.finish_gradients()
            load = runtime.end_iteration()[0]
            iterations.append((used[-1].placement.digest(), load.counts_DE, load.device_D))
        found.append(iterations)
    return found


def test_simulated_plans_and_loads_equal_those_of_the_runtime() -> None:
    results = run_ranks(run_layers, WORLD)[0]
    replicated = set()
    for (name, keys), iterations in zip(CASES, results, strict=True):
        plans: list[LayerPlan] = []
        strategy = build_strategy(name, strategy_settings(name, keys, "test"))
        counts_ILDE = np.stack([counts_DE for _, counts_DE, _ in iterations])[:, None]
        ledger = replay_strategy(
            strategy,
            counts_ILDE,
            Topology.uniform(WORLD, 2),
            PROFILE,
            on_plan=lambda iteration, layer, plan, plans=plans: plans.append(plan),
        )
        assert [plan.placement.digest() for plan in plans] == [digest for digest, _, _ in iterations], keys
        assert ledger.tokens_ILD[:, 0].tolist() == [device_D.tolist() for _, _, device_D in iterations], keys
        if ledger.replicas_IL.any():
            replicated.add(name)
            lives = {plan.life for plan in plans if plan.placement.num_replicas}
            assert lives == {strategy.replica_life}, keys
        if keys.get("calibrate") or keys == BY_PRICE:
            assert ledger.addition.num_experts_IL.any(), keys
        if keys == BY_PRICE:
            brought_IL = ledger.gather.num_experts_IL + ledger.addition.num_experts_IL
            assert (brought_IL > ledger.replicas_IL).any(), "replicas are dropped after the gate"
    assert replicated == {"fssdp", "fastermoe", "prophet", "quota", "flexmoe"}
