import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.placement.owner_map import OwnerMap
from megatron_fssdp.planning.placement.placement import even_owners
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.fssdp import FssdpSettings
from megatron_fssdp.strategies.fssdp.hecate_algorithms import heterogeneous_sharding, sparse_materialization
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.strategies.layer_planning import plan_after_gate
from megatron_fssdp.strategies.registry import build_strategy
from tests.drawn_examples import SEEDS, examples
from tests.planning.placement_cases import history_of, owned_layers, random_counts_DE

PLACEMENT_STRATEGIES = [name for name, entry in STRATEGIES.items() if entry.strategy is not None]


LAYERS = owned_layers().map(lambda drawn: LayerContext(3, drawn[1], drawn[0]))


def drawn_history(context, window, seeds):
    sizes = context.num_devices, context.num_experts
    return history_of(context, *(random_counts_DE(seed, *sizes) for seed in seeds), window=window)


seeds = st.lists(SEEDS, max_size=4)
bounds = st.one_of(st.none(), st.integers(0, 12))


@given(LAYERS, st.sampled_from(PLACEMENT_STRATEGIES), seeds)
@examples(60)
def test_every_strategy_is_deterministic_and_leaves_its_arguments_alone(context, name, seeds):
    keys = STRATEGIES[name].settings()

    def plan():
        strategy = build_strategy(name, keys)
        return strategy.before_gate(context, drawn_history(context, strategy.window, seeds))

    owner_E = context.owner_E.copy()
    first, second = plan(), plan()
    assert first.placement.digest() == second.placement.digest()
    assert np.array_equal(first.transfer.table, second.transfer.table)
    assert np.array_equal(context.owner_E, owner_E)
    assert np.array_equal(first.placement.owner_E, owner_E), "owners do not move"


def hot_counts_DE(hot):
    counts_DE = np.full((4, 8), 10)
    counts_DE[:, hot] = 50
    return counts_DE


@given(context=LAYERS, seeds=seeds, slots=bounds, degree=bounds)
def test_the_hecate_planner_follows_algorithm_1(context, seeds, slots, degree):
    history = drawn_history(context, 5, seeds)
    settings = FssdpSettings.model_construct(slots=slots, overlap_degree=degree, planner="hecate")
    placement = build_strategy("fssdp", settings).before_gate(context, history).placement
    wanted = sparse_materialization(
        context.owner_E,
        history.mean_DE().sum(axis=0),  # In this order, because rounding decides between equal loads.
        context.topology,
        overlap_degree=context.num_experts if degree is None else degree,
        slots=-(-context.num_experts // context.num_devices) if slots is None else slots,
    )
    assert placement == wanted


def measured(non_moe_s=1e-3, memory_capacity=3):
    """Links of 1 MB/s and experts of 100 bytes: 10 experts travel in a millisecond."""
    link = LinkCost(1e-9, 1e-6)
    return LayerProfile(non_moe_s, ClusterCost(link, link, 1e9), 100, 1, 1e6, memory_capacity)


CONTEXT = LayerContext(1, even_owners(8, 4), Topology.uniform(4, 1))
SQUARES = np.arange(32).reshape(4, 8) ** 2


@pytest.mark.parametrize(
    ("given", "profile", "degree", "slots"),
    [
        ({}, None, 8, 2),  # before the profile: all experts, and as many slots as a device owns experts
        ({}, measured(non_moe_s=5e-4), 5, 3),
        ({}, measured(non_moe_s=1.0, memory_capacity=0), 8, 0),
        ({"slots": 1}, measured(non_moe_s=5e-4), 5, 1),
        ({"overlap_degree": 4}, measured(non_moe_s=5e-4), 4, 3),
        ({"slots": 1, "overlap_degree": 12}, measured(), 8, 1),
        ({"slots": 0, "overlap_degree": 0}, None, 0, 0),
    ],
)
def test_replica_limits_are_given_or_measured(given, profile, degree, slots):
    strategy = build_strategy("fssdp", FssdpSettings(**given))
    context = dataclasses.replace(CONTEXT, profile=profile)
    assert (strategy.overlap_degree(context), strategy.slots(context)) == (degree, slots)
    placement = strategy.before_gate(context, history_of(context, SQUARES)).placement
    assert placement.replicas_per_device_D.max() <= slots
    by_seconds = profile is not None and "overlap_degree" not in given  # and no degree limits them
    assert (placement.present_ED.sum(axis=1) > 1).sum() <= (8 if by_seconds else degree)


@pytest.mark.parametrize("overlap", [True, False])
def test_transfers_without_overlap_count_in_the_price(overlap):
    """Experts take far longer to travel than they save, so they get replicas only where that is hidden."""
    profile = dataclasses.replace(measured(non_moe_s=1e3), expert_bytes=10**8)
    strategy = build_strategy("fssdp", FssdpSettings(slots=1, overlap=overlap))
    context = dataclasses.replace(CONTEXT, profile=profile)
    plan = strategy.before_gate(context, history_of(context, SQUARES))
    assert bool(plan.placement.num_replicas) is overlap


@pytest.mark.parametrize(
    ("given", "iterations"),
    [
        ({}, 3),
        ({"slots": 1}, 3),
        ({"overlap_degree": 1}, 3),
        ({"slots": 1, "overlap_degree": 1}, 0),
        ({"slots": 1, "overlap_degree": 1, "planner": "hecate"}, 3),
        ({"slots": 1, "overlap_degree": 1, "exchange": "by_price"}, 3),
    ],
)
def test_iterations_are_measured_only_for_limits_that_are_not_given(given, iterations):
    assert build_strategy("fssdp", FssdpSettings(**given)).profile_iterations == iterations


def test_reshards_follow_the_loads_of_experts_without_replicas():
    """The hottest experts have replicas anyway, so re-sharding balances the owners of the others."""
    owners = OwnerMap.even(2, 8, 4)
    load_LE = np.array([[50.0, 40, 1, 1, 1, 1, 1, 1]] * 2)
    contexts = [CONTEXT, CONTEXT]
    strategy = build_strategy("fssdp", FssdpSettings(overlap_degree=0))
    assert strategy.reshard(contexts, np.zeros((2, 8)), owners) is owners
    moved = strategy.reshard(contexts, load_LE, owners)
    assert owners.moves_to(moved)

    def worst(owner_map):
        return max(
            np.bincount(owner_map.device_LE[layer], weights=load_LE[layer], minlength=4).max()
            for layer in range(2)
        )

    assert worst(owners) == 90
    assert worst(moved) <= 52
    replicated = build_strategy("fssdp", FssdpSettings(overlap_degree=2))
    wanted = heterogeneous_sharding(owners, load_LE, CONTEXT.topology, overlap_degree=2)
    assert replicated.reshard(contexts, load_LE, owners).digest() == wanted.digest()
    # Measured limits count like given ones; the layer that can replicate least decides.
    of_layers = [dataclasses.replace(CONTEXT, profile=measured(seconds)) for seconds in (8e-4, 2e-4)]
    by_profile = build_strategy("fssdp", FssdpSettings(planner="hecate"))
    assert by_profile.reshard(of_layers, load_LE, owners).digest() == wanted.digest()
    # By seconds, owners also wait until costs are measured.
    by_seconds = build_strategy("fssdp", FssdpSettings())
    assert by_seconds.reshard(contexts, load_LE, owners) is owners


@pytest.mark.parametrize(("keys", "wanted"), [({}, [5, 20, 40]), ({"overlap_degree": 1}, [20, 40])])
def test_owners_are_reconsidered_at_an_interval_and_by_seconds_also_after_a_window(keys, wanted):
    strategy = build_strategy("fssdp", FssdpSettings(reshard_interval=20, **keys))
    assert [iteration for iteration in range(41) if strategy.reshards_at(iteration)] == wanted


def test_owners_move_by_seconds_if_that_pays_until_the_next_re_shard():
    owners, profile = OwnerMap.even(2, 8, 4), dataclasses.replace(measured(0.0), owned_bytes=10**8)
    context = dataclasses.replace(CONTEXT, profile=profile)
    load_LE = np.array([[5000.0, 4000, 100, 100, 100, 100, 100, 100]] * 2)
    for interval, pays in ((1, False), (10**6, True)):
        strategy = build_strategy("fssdp", FssdpSettings(slots=0, reshard_interval=interval))
        for _ in range(2):
            moved = strategy.reshard([context] * 2, load_LE, owners)
            assert bool(owners.moves_to(moved)) == pays
        assert strategy.reshard([context] * 2, np.ones((2, 8)), owners) is owners, "nothing is uneven"


@pytest.mark.parametrize(("slots", "is_graph"), [(2, False), (None, False), (2, True)])
def test_an_iteration_without_loads_is_planned_by_its_counts(slots, is_graph):
    strategy = build_strategy("fssdp", FssdpSettings(slots=slots))
    context, history = dataclasses.replace(CONTEXT, shares_evenly=is_graph), history_of(CONTEXT)
    plan, counts_DE = strategy.before_gate(context, history), hot_counts_DE(hot=5)
    assert plan.placement.num_replicas == 0
    assert plan.corrects != is_graph
    after = plan_after_gate(strategy, context, counts_DE, plan, 4)
    assert bool(after.placement.num_replicas) != is_graph
    if not is_graph:
        assert len(after.placement.holders(5)) > 1
        assert after.rematerialize == plan.rematerialize == (slots is None), "memory is not measured"
        assert after.placement.replicas_per_device_D.max() <= 2
        load_D, plain_D = (way.dispatch(counts_DE, CONTEXT.topology).device_tokens_D for way in (after, plan))
        assert load_D.max() < 0.8 * plain_D.max()
    history.append(counts_DE)
    later = strategy.before_gate(context, history)
    assert later.placement.num_replicas, "later iterations have loads"
    assert not later.corrects


@pytest.mark.parametrize(("name", "settings"), [("prophet", {}), ("fssdp", {"slots": 2})])
@pytest.mark.parametrize(("non_moe_s", "is_split"), [(1.0, False), (1e-3, True)])
def test_transfers_are_split_where_the_compute_before_does_not_hide_them(name, settings, non_moe_s, is_split):
    """An expert of 1 MB takes 10 ms to each of three others, one after another."""
    link = LinkCost(0.0, 1e-8)
    profile = LayerProfile(non_moe_s, ClusterCost(link, link, 1e6), 1_000_000, 1000, 1e4, memory_capacity=2)
    context = dataclasses.replace(CONTEXT, profile=profile)
    history = history_of(CONTEXT, hot_counts_DE(3))
    model = STRATEGIES[name].settings
    plan = build_strategy(name, model.model_validate(settings)).before_gate(context, history)
    assert plan.placement.num_replicas
    assert plan.is_split == is_split
    assert (0 < plan.early < 1) == is_split
    in_turn = model.model_validate({**settings, "overlap": False})
    assert not build_strategy(name, in_turn).before_gate(context, history).is_split
