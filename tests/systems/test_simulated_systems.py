from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.cli.analysis.strategy_ranking import settings_of
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.strategy.strategy_registry import register_strategy, strategy_settings
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.simulation.simulator import simulate
from megatron_fssdp.strategies.layer_plan import LayerContext
from megatron_fssdp.systems.eplb import EplbKeys, EplbSystem
from megatron_fssdp.systems.system_list import SYSTEMS
from tests.simulation.small_jobs import cluster_of, job_of
from tests.simulation.test_simulated_properties import drawn_loads

EVERY = {"placement_interval": 2, "window": 2}


def outcome_of(name, counts_ILDE, **keys):
    job = job_of(devices=4, experts=8, layers=counts_ILDE.shape[1])
    return simulate(name, SYSTEMS[name].settings(**keys), counts_ILDE, cluster_of(nodes=2), job)


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_system_loses_tokens_or_can_be_trained(name):
    counts_ILDE = drawn_loads(5)
    outcome = outcome_of(name, counts_ILDE, **(EVERY if name == "eplb-like" else {}))
    assert (outcome.tokens_ILD.sum(axis=2) == counts_ILDE.sum(axis=(2, 3))).all()
    assert (outcome.iteration_s > 0).all()
    with pytest.raises(ConfigurationError, match=name):
        strategy_settings(name, {}, "defaults")
    with pytest.raises(ConfigurationError, match="wanted a name of"):
        register_strategy(name, settings=SYSTEMS[name].settings, strategy=SYSTEMS[name].strategy, summary="")


def test_moonep_has_even_loads_and_ultraep_waits_for_plans_and_stays_in_its_node():
    counts_ILDE = drawn_loads(7)
    assert outcome_of("moonep-like", counts_ILDE).load_max_over_mean_IL == pytest.approx(1.0)
    ultraep = outcome_of("ultraep-like", counts_ILDE)
    assert ultraep.parts_s["host"] == pytest.approx([2 * 78e-6] * 4)
    assert ultraep.of_layers("replicas").any()
    assert not ultraep.of_layers("gathered_between_nodes").any()
    assert outcome_of("moonep-like", counts_ILDE).of_layers("gathered_between_nodes").any()
    few = outcome_of("ultraep-like", counts_ILDE, slots=0)
    assert not few.of_layers("replicas").any()


def test_eplb_places_all_copies_anew_at_the_interval():
    counts_ILDE = np.zeros((5, 1, 4, 8), np.int32)
    counts_ILDE[:, 0, :, 0] = 20
    counts_ILDE[:, 0, :, 1:] = 4
    outcome = outcome_of("eplb-like", counts_ILDE, **EVERY)
    assert outcome.warm_up == 4  # costs are measured in the first three
    before, after = outcome.load_max_over_mean_IL[:2], outcome.load_max_over_mean_IL[2:]
    # 12 slots: the hot expert has 4 of them, one of which is on a device with its other half.
    assert (after < before[0]).all()
    assert outcome.moved_I.tolist()[:2] == [0, 0]
    assert outcome.moved_I[2] > 0
    assert outcome.moved_I[4] == 0
    assert outcome.parts_s["re-sharding"][2] > 0


def test_eplb_divides_pairs_equally_among_copies_also_on_one_device():
    strategy = EplbSystem(EplbKeys(slots=2))
    context = LayerContext(1, np.array([0, 1]), Topology.uniform(2, 1))
    placement = strategy.replicate(context, np.array([[50.0, 1.0], [50.0, 1.0]]))
    # Five copies of the hot expert on two devices with three slots.
    layer = LayerContext(1, context.owner_E, context.topology, resident=placement)
    plan = strategy.before_gate(layer, None)
    after = strategy.after_gate(layer, np.array([[60, 7], [40, 0]]), plan, 1)
    assert after.tokens_ED is not None
    assert sorted(after.tokens_ED[0].tolist()) == [40, 60]
    assert sorted(after.tokens_ED[1].tolist()) == [0, 7]


def test_sizes_that_eplb_cannot_place_are_refused():
    with pytest.raises(ValueError, match="eplb-like: got 8 experts in 3 groups"):
        outcome_of("eplb-like", drawn_loads(1), num_groups=3)


def test_overrides_reach_systems_that_have_the_key():
    run = load_run([Path("gpt_moe_tiny")], ())
    assert settings_of("ultraep-like", run, ("slots=3", "num_groups=2")).slots == 3
    assert settings_of("eplb-like", run, ("num_groups=2",)).num_groups == 2
