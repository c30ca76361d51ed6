"""What a session sets up for a strategy, and what the simulator assumes of it, for every registered strategy.

Shape letters: D devices, E experts, T tokens of a rank.
"""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.config.strategy.strategy_selection import strategy_settings
from megatron_fssdp.megatron_adapter.layer.strategy_session import StrategySession
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.slots.share_table import ROWS
from megatron_fssdp.runtime.layers.slot_layer import SlotLayer
from megatron_fssdp.runtime.layers.slot_pass import SlotPass
from megatron_fssdp.runtime.layers.strategy_selector import StrategySelector
from megatron_fssdp.simulation.replay import replay_strategy
from megatron_fssdp.strategies.auto import AutoStrategy
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.registry import build_strategy
from megatron_fssdp.strategies.strategy import Strategy
from megatron_fssdp.testing import run_megatron_ranks

EXAMPLE = "second_home"
EXAMPLE_FOLDER = Path(__file__).parents[3] / "examples" / EXAMPLE
PLANNING = [name for name, entry in STRATEGIES.items() if entry.strategy is not None and name != EXAMPLE]
# Short intervals, so that everything happens in the run; a strategy without keys here runs with its defaults.
KEYS: dict[str, dict[str, Any]] = {
    "fssdp": {"slots": 2, "reshard_interval": 4},
    "prophet": {"left_out": 1},
    "quota": {"slots": 2},
    "smartmoe": {"reshard_interval": 4, "window": 3},
    "flexmoe": {"slots": 2, "placement_interval": 4, "window": 3},
    "auto": {"choice_interval": 4, "smartmoe": {"reshard_interval": 4, "window": 3}},
    EXAMPLE: {"threshold": 1, "swap_every": 4},
}
NUM_EXPERTS, NUM_TOKENS, NUM_ITERATIONS, WORLD = 8, ROWS, 12, 4
LINK = LinkCost(0.0, 1e-9)
PROFILE = LayerProfile(1e-6, ClusterCost(LINK, LINK, 1e6), 300, 100, 50.0, 3)


@dataclass
class Seen:
    """One strategy's run, in the runtime or in the simulator, by iteration.

    Attributes:
        placements: Digest of the placement in use.
        tokens_D: (token, k) pairs that each device computes.
        overlaps: Whether replicas travel beside something else.
        lives: How long replicas live; ``None`` without replicas.
        moved: Experts that change their owner, or that get a resident replica.
    """

    placements: list[bytes] = field(default_factory=list)
    tokens_D: list[list[int]] = field(default_factory=list)
    overlaps: list[bool] = field(default_factory=list)
    lives: list[ReplicaLife | None] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)


def register_example() -> None:
    if EXAMPLE not in STRATEGIES:
        sys.path.insert(0, str(EXAMPLE_FOLDER))
        import second_home

        second_home.register()


def variants(name: str) -> dict[str, dict[str, Any]]:
    """The strategy as it is, and in turn where users can set that."""
    keys = KEYS.get(name, {})
    found = {name: keys}
    if "overlap" in STRATEGIES[name].settings.model_fields:
        found[f"{name} in turn"] = {**keys, "overlap": False}
    return found


def compare(rank: int, world_size: int, name: str) -> dict[str, tuple[Seen, Seen, dict[str, Any]]]:
    """What the runtime and the simulator did, and what the session has set up, of each variant."""
    register_example()
    found = {}
    for label, keys in variants(name).items():
        settings: Any = strategy_settings(name, {**keys, "nodes": 2}, "test")
        session = StrategySession(name, settings)
        seen, counts_ILDE = run_session(session, rank)
        fresh = build_strategy(name, settings)
        simulated = simulate_session(fresh, counts_ILDE, session)
        strategy = session.strategy
        set_up = {
            "has transfer group": session.runtime.layers[0].groups.transfers is not None,
            "moves owners": strategy.moves_owners,
            "resident slots": strategy.resident_slots,
            "selects": strategy.selects,
            "may replicate": strategy.selects or strategy.may_replicate(1),
        }
        found[label] = seen, simulated, set_up
    return found


def run_session(session: StrategySession, rank: int) -> tuple[Seen, np.ndarray]:
    """Drive one layer as the adapter drives it between and in iterations."""
    strategy = session.strategy
    alone = dist.new_subgroups(1)[0]
    groups = session.expert_groups(dist.group.WORLD, alone)  # type: ignore[arg-type]
    owner_E = even_owners(NUM_EXPERTS, WORLD)
    context = LayerContext(1, owner_E, groups.topology)
    layer = session.runtime.add_layer(context, groups, tensors_of(np.flatnonzero(owner_E == rank)))
    layer.measure = True
    used: list[SlotPass] = []
    layer.on_pass = used.append
    selector = StrategySelector(strategy, [dist.group.WORLD], torch.device("cpu"))  # type: ignore[list-item]
    owners = OwnerMap.even(1, NUM_EXPERTS, WORLD)
    rng, seen, counts = np.random.default_rng(rank), Seen(), []
    for iteration in range(NUM_ITERATIONS):
        if strategy.profile_iterations and iteration == strategy.profile_iterations:
            layer.context = replace(layer.context, profile=PROFILE)
        if isinstance(strategy, AutoStrategy):
            selector.select([layer], iteration)
        moved = 0
        if strategy.moves_owners and strategy.reshards_at(iteration):
            new = strategy.reshard([layer.context], layer.history.mean_E()[None], owners)
            moved, owners = len(owners.moves_to(new)), new
            tensors = tensors_of(np.flatnonzero(new.device_LE[0] == rank))
            layer.own(new.device_LE[0], tensors, layer.experts.layout())
        if strategy.replicates_at(iteration):
            old = layer.context.placement
            placement = strategy.replicate(layer.context, layer.history.mean_DE())
            moved += int((placement.present_ED & ~old.present_ED).sum())
            here = [e for e in placement.experts_on(rank) if e not in layer.experts.parameters]
            layer.keep(placement, tensors_of(np.array(here, np.int64)))
        used.clear()
        session.runtime.begin_iteration(1)
        session.runtime.begin_passes()
        # Popular experts of one device, and others in the second half.
        score_TE = rng.gumbel(size=(NUM_TOKENS, NUM_EXPERTS))
        score_TE[:, (0, 1) if iteration < NUM_ITERATIONS // 2 else (4, 5)] += 2
        routing_TE = np.zeros(score_TE.shape, bool)
        np.put_along_axis(routing_TE, np.argsort(-score_TE, axis=1)[:, :2], True, axis=1)
        begins_early = run_passes(layer, torch.from_numpy(routing_TE), used)
        session.runtime.finish_gradients()
        session.runtime.end_passes()
        load = session.runtime.end_iteration()[0]
        plan, replicas = used[-1].plan, used[-1].plan.placement.num_replicas
        seen.placements.append(plan.placement.digest())
        seen.tokens_D.append(load.device_D.tolist())
        seen.overlaps.append(bool(replicas) and begins_early)
        seen.lives.append(plan.life if replicas else None)
        seen.moved.append(moved)
        counts.append(load.counts_DE)
    return seen, np.stack(counts)[:, None]


def run_passes(layer: SlotLayer, routing_map: torch.Tensor, used: list[SlotPass]) -> bool:
    """One micro-batch whose rows stay where they are.

    Returns:
        Whether transfers run beside something else: weights that have not arrived when the rows leave, or
        sums of resident replicas in a group of their own.
    """
    hidden = torch.ones(NUM_TOKENS, 2, requires_grad=True)
    layer.launch(hidden)
    ahead = bool(used) and used[-1].transfers is not None and used[-1].transfers.is_gathered
    has_own_group = layer.groups.transfers is not None
    layer.prepare(routing_map, training=True)
    layer.remap(routing_map, torch.ones(routing_map.shape))
    one = used[-1]
    transfers = one.transfers
    is_late = transfers is not None and not (transfers.is_gathered and not transfers._gathering)
    rows = layer.enter_dispatch(hidden)
    layer.rows_travel()
    with layer.await_weights(rows):
        rows = rows * 2
    layer.finish(layer.leave_experts(rows)).sum().backward()
    return has_own_group and (ahead or is_late or (one.plan.resident and one.plan.gather_ahead))


def tensors_of(experts: np.ndarray) -> dict[int, list[torch.nn.Parameter]]:
    return {int(e): [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)] for e in experts}


def simulate_session(strategy: Strategy, counts_ILDE: np.ndarray, session: StrategySession) -> Seen:
    """The same loads in the simulator's replay."""
    topology = session.runtime.layers[0].groups.topology
    iterations = replay_strategy(
        strategy, counts_ILDE, topology, PROFILE, lambda _, __, ___, plan, counts_DE: (plan, counts_DE)
    )
    decided = [layer for iteration in iterations for layer in iteration.layers]
    plans = [plan for plan, _ in decided]
    return Seen(
        placements=[plan.placement.digest() for plan in plans],
        tokens_D=[plan.dispatch(counts_DE, topology).whole_tokens_D.tolist() for plan, counts_DE in decided],
        overlaps=[plan.gather_ahead and plan.placement.num_replicas > 0 for plan in plans],
        lives=[plan.life if plan.placement.num_replicas else None for plan in plans],
        moved=[iteration.num_moved for iteration in iterations],
    )


@pytest.mark.parametrize("name", [*PLANNING, EXAMPLE])
def test_session_and_simulator_agree(name: str) -> None:
    for label, (seen, simulated, set_up) in run_megatron_ranks(compare, WORLD, name, ep=WORLD)[0].items():
        assert seen.placements == simulated.placements, label
        # Plans of exact shares have parts of tokens. Each source's share table rounds them to whole tokens.
        difference_ID = np.subtract(seen.tokens_D, simulated.tokens_D)
        assert np.abs(difference_ID).max() <= WORLD, label
        assert not difference_ID.sum(axis=1).any(), label
        assert seen.overlaps == simulated.overlaps, label
        assert seen.lives == simulated.lives, label
        assert seen.moved == simulated.moved, label
        # None of this is empty: what a strategy says that it can do, it does.
        assert any(seen.lives) == set_up["may replicate"], label
        if not set_up["selects"]:
            assert any(seen.moved) == bool(set_up["moves owners"] or set_up["resident slots"]), label
        if any(simulated.overlaps):
            assert set_up["has transfer group"], label
        if "in turn" in label:
            assert not any(simulated.overlaps), label
