"""A forced hot expert: 40 % of the assignments on one of 8, top-2, 4 devices."""

import numpy as np
import pytest
import torch

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.testing import run_ranks

from ..layer_case import ACTIVATIONS
from ..one_layer import one_layer
from ..rank_layer import moe_forward

NUM_EXPERTS, NUM_TOKENS, WINDOW = 8, 2048, 2


def hot_routing(rng: np.random.Generator, hot: int) -> np.ndarray:
    """bool [T, E]: 80 % of the tokens choose the hot expert and another one, the rest two others."""
    score_TE = rng.random((NUM_TOKENS, NUM_EXPERTS))
    score_TE[:, hot] = -1.0
    score_TE[rng.permutation(NUM_TOKENS) < 0.8 * NUM_TOKENS, hot] = 2.0
    routing_TE = np.zeros(score_TE.shape, dtype=bool)
    np.put_along_axis(routing_TE, np.argsort(-score_TE, axis=1)[:, :2], True, axis=1)
    return routing_TE


def run_hot(rank: int, world_size: int, cases: list[tuple[str, dict, int, int]]) -> list[tuple[float, float]]:
    """Max over mean device load (as run, and under plain EP) of the iteration after a full window."""
    found = []
    for name, settings, num_nodes, hot in cases:
        strategy = build_strategy(name, STRATEGIES[name].settings.model_validate(settings))
        topology = Topology.uniform(world_size, num_nodes)
        runtime, executor = one_layer(strategy, NUM_EXPERTS, topology, rank)
        rng = np.random.default_rng(100 * hot + rank)
        for _ in range(WINDOW + 1):
            runtime.begin_iteration()
            routing_map = torch.from_numpy(hot_routing(rng, hot))
            hidden, probs = torch.ones(NUM_TOKENS, 2), torch.ones(NUM_TOKENS, NUM_EXPERTS)
            moe_forward(executor, hidden, probs, routing_map, ACTIVATIONS["relu"]).sum().backward()
            load = runtime.end_iteration()[0]
        if rank == 0:
            assert abs(load.counts_DE[:, hot].sum() / load.counts_DE.sum() - 0.4) < 0.001
            mean = load.counts_DE.sum() / world_size
            found.append((float(load.device_D.max() / mean), float(load.owner_D.max() / mean)))
    return found


def test_replicas_balance_the_device_loads() -> None:
    window = {"window": WINDOW}
    cases: list[tuple[str, dict, int, int]] = [("ep", {}, 1, hot) for hot in (0, 5)]
    cases += [
        ("fssdp", {"slots": slots, **window}, num_nodes, hot)
        for slots in (2, 8)
        for num_nodes in (1, 2)
        for hot in (0, 5)
    ]
    results = run_ranks(run_hot, 4, cases)[0]
    for (name, settings, num_nodes, hot), (ratio, owners_ratio) in zip(cases, results, strict=True):
        case = f"{name} {settings} on {num_nodes} nodes, hot expert {hot}: {ratio}"
        assert owners_ratio == pytest.approx(1.94, abs=0.03), case
        limit = {"ep": owners_ratio, "fssdp": {2: 1.10, 8: 1.01}.get(settings.get("slots", 0), 0.0)}[name]
        assert ratio <= limit, case
        if name == "ep":
            assert ratio == owners_ratio
