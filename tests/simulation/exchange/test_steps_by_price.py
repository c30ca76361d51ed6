"""Layers that run in steps only where modelled seconds say so, simulated."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.simulation.simulator import StrategyOutcome, simulate
from tests.drawn_examples import examples
from tests.simulation.small_jobs import cluster_of, job_of, settings_of

SEEDS = st.integers(0, 2**32 - 1)


def outcomes_of(name: str, counts: np.ndarray, past: np.ndarray) -> list[StrategyOutcome]:
    """Outcomes without steps, always in steps, and by price; start-ups make steps expensive."""
    cluster = cluster_of(nodes=4, far_alpha_s=2.0)
    job = job_of(devices=8, experts=8, layers=counts.shape[1], num_micro_batches=2)
    return [
        simulate(
            name,
            settings_of(name, smart_schedule=value),
            counts,
            cluster,
            job,
            past_ILDE=past,
        )
        for value in (False, True, "by_price")
    ]


def drawn_loads(seed: int, iterations: int, layers: int) -> np.ndarray:
    """Loads of very different sizes, so that both orders occur."""
    rng = np.random.default_rng(seed)
    shape = (iterations, layers)
    shares = rng.dirichlet(np.full(8, 0.4), size=shape)
    pairs = rng.choice([2, 20, 200], size=shape)
    return rng.poisson(pairs[..., None, None] * shares[:, :, None, :].repeat(8, axis=2)).astype(np.int32) + 1


@examples(10)
@given(SEEDS)
def test_a_layer_never_takes_longer_than_in_either_order(seed: int) -> None:
    """Loads stay as they are, so that the forecast is exact."""
    counts = drawn_loads(seed, 1, 3)
    at_once, in_steps, by_price = (outcome.layers.moe_s() for outcome in outcomes_of("ep", counts, counts))
    assert (by_price <= np.minimum(at_once, in_steps) + 1e-12).all()


@examples(10)
@given(SEEDS)
def test_an_iteration_takes_as_long_as_in_the_selected_order(seed: int) -> None:
    counts = drawn_loads(seed, 6, 1)
    at_once, in_steps, by_price = outcomes_of("ep", counts, counts[:1])
    used_I = by_price.ledger.in_steps_IL[:, 0]
    wanted_s = np.where(used_I, in_steps.iteration_s, at_once.iteration_s)
    np.testing.assert_allclose(by_price.iteration_s, wanted_s, rtol=1e-12)


def test_layers_differ_and_change() -> None:
    counts = drawn_loads(1, 12, 2)
    in_steps_IL = outcomes_of("ep", counts, counts[:1])[2].ledger.in_steps_IL
    assert (in_steps_IL[:, 0] != in_steps_IL[:, 1]).any()
    assert (in_steps_IL[1:] != in_steps_IL[:-1]).any()


def test_without_costs_nothing_runs_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = drawn_loads(0, 4, 1)
    job = job_of(devices=8, experts=8)
    monkeypatch.setenv("FSSDP_PROFILE_ITERATIONS", "2")
    settings = settings_of("ep", smart_schedule="by_price")
    outcome = simulate("ep", settings, 100 * counts, cluster_of(nodes=4), job)
    assert outcome.ledger.in_steps_IL[:, 0].tolist() == [False, False, True, True]
