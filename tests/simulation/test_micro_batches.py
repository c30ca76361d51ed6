"""Loads that change between the micro-batches of an iteration."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.simulation import replay
from megatron_fssdp.simulation.simulator import balanced_counts
from tests.drawn_examples import SEEDS, examples
from tests.simulation.small_jobs import outcome_of

NAMES = [name for name, entry in STRATEGIES.items() if entry.strategy is not None]
HOT, COLD = [[6, 2], [6, 2]], [[2, 6], [2, 6]]


def simulated(name, counts, micro_batches, past=None, **keys):
    job = {"num_micro_batches": micro_batches, "activation_bytes_per_pair": 1.0}
    return outcome_of(name, counts, keys=keys, past=past, **job)


def test_the_busiest_device_of_each_micro_batch_sets_its_time():
    changing_IZLDE = np.array([[HOT, COLD]])[:, :, None]
    changing = simulated("ep", changing_IZLDE, 2)
    # In each micro-batch, one of the devices has 12 of 16 tokens, as in every one of two equal ones.
    equal = simulated("ep", np.array([[HOT]]) * 2, 2)
    assert changing.parts_s["experts"] == pytest.approx(2 * 3 * 12 * 3 / 10)
    assert changing.iteration_s == pytest.approx(equal.iteration_s)
    assert changing.load_max_over_mean_IL.tolist() == [[1.5]]
    assert changing.tokens_ILD.tolist() == [[[16, 16]]]
    assert changing.memory.activation_bytes == equal.memory.activation_bytes == 12
    # The sum alone looks balanced.
    assert simulated("ep", changing_IZLDE.sum(axis=1), 2).load_max_over_mean_IL.tolist() == [[1.0]]
    assert balanced_counts(changing_IZLDE).tolist() == [[[[8, 8], [8, 8]]]]


@examples(20)
@given(SEEDS, st.sampled_from(NAMES), st.sampled_from([2, 3, 5]), st.booleans())
def test_equal_micro_batches_are_as_one_for_all(seed, name, number, again):
    rng = np.random.default_rng(seed)
    # Exact shares count one token more for each expert, which is little of many.
    single_ILDE = rng.multinomial(4000, rng.dirichlet(np.full(8, 0.4)), size=(5, 2, 4)).astype(np.int32)
    keys = {"rematerialize": again} if name == "fssdp" else {}
    divided = simulated(name, np.repeat(single_ILDE[:, None], number, axis=1), number, **keys)
    together = simulated(name, single_ILDE * number, number, **keys)
    for part, seconds in together.parts_s.items():
        np.testing.assert_allclose(divided.parts_s[part], seconds, rtol=1e-4, atol=1e-9)
    for quantity in ("host_s", "gathered", "replicas", "deduplicated"):
        np.testing.assert_allclose(divided.of_layers(quantity), together.of_layers(quantity), rtol=1e-9)
    assert divided.memory.experts == together.memory.experts
    # Exact shares are parts of tokens, which every micro-batch rounds.
    for quantity in ("tokens_D", "cross_node"):
        np.testing.assert_allclose(divided.of_layers(quantity), together.of_layers(quantity), atol=number)
    assert divided.memory.activation_bytes == pytest.approx(together.memory.activation_bytes, abs=2)


@pytest.mark.parametrize("name", ["fssdp", "quota"])
def test_strategies_are_asked_as_by_the_runtime(name, monkeypatch):
    """Once with the first micro-batch and the number of all, or for each one with its own counts."""
    asked = []
    known = []
    before_gate, after_gate = replay.plan_before_gate, replay.plan_after_gate

    def before(strategy, context, history):
        if not history.is_empty:
            known.append([counts_DE.sum(axis=0).tolist() for counts_DE in history.iterations_like(9)])
        return before_gate(strategy, context, history)

    def after(strategy, context, counts_DE, plan, number):
        asked.append((counts_DE.sum(axis=0).tolist(), number))
        return after_gate(strategy, context, counts_DE, plan, number)

    monkeypatch.setattr(replay, "plan_before_gate", before)
    monkeypatch.setattr(replay, "plan_after_gate", after)
    counts_IZLDE = np.array([[HOT, COLD], [COLD, HOT]])[:, :, None]
    outcome = simulated(name, counts_IZLDE, 2, past=counts_IZLDE[:1], slots=1)
    hot, cold = [12, 4], [4, 12]
    assert known == [[[24, 8], [8, 24]]] * 2
    if name == "fssdp":
        assert asked == [(hot, 2), (cold, 2)]
        return
    assert asked == [(hot, 1), (cold, 1), (cold, 1), (hot, 1)]
    # Every micro-batch has the replica that its own hot expert needs.
    assert outcome.load_max_over_mean_IL.tolist() == [[1.0], [1.0]]
    assert outcome.of_layers("replicas").tolist() == [[1], [1]]


def test_other_numbers_of_micro_batches_are_refused():
    counts = np.array([[HOT, COLD]])[:, :, None]
    with pytest.raises(ValueError, match="with 3 micro-batches"):
        simulated("ep", counts, 3)
    with pytest.raises(ValueError, match="with 1 micro-batches"):
        simulated("ep", counts.sum(axis=1), 1, past=counts)
