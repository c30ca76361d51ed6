import numpy as np
import pytest
from hypothesis import given

from megatron_fssdp.strategies.layer_planning import LEAST_GAIN
from tests.drawn_examples import SEEDS, examples
from tests.simulation.small_jobs import cluster_of, outcome_of

KEYS = {"ep": {}, "fssdp": {"slots": 1, "reshard_interval": 0}}
VALUES = {"exchange": ("megatron", "deduplicated", "by_price"), "smart_schedule": (False, True, "by_price")}
CLUSTERS = {
    "exchange": cluster_of(nodes=2, far_alpha_s=100.0),
    "smart_schedule": cluster_of(nodes=4, far_alpha_s=2.0),
}
JOBS = {
    "exchange": {"devices": 4, "top_k": 4, "tokens_per_micro_batch": 256, "token_bytes": 600},
    "smart_schedule": {"devices": 8, "num_micro_batches": 2},
}
PAIRS = {"exchange": (2, 40, 800), "smart_schedule": (2, 20, 200)}
both = pytest.mark.parametrize("key", list(VALUES))


def outcomes_of(key, name, counts, past, cluster=None, **job):
    """Outcomes with the usual order and exchange, always with the other one, and by price."""
    how = {"cluster": cluster or CLUSTERS[key], "past": past, **JOBS[key], **job}
    return [outcome_of(name, counts, keys={key: value, **KEYS[name]}, **how) for value in VALUES[key]]


def is_used(key, outcome):
    """Whether each layer used the other exchange or order, bool ``[I, L]``."""
    layers_IL = [iteration.micro_batches[0] for iteration in outcome.iterations]
    name, usual = {"exchange": ("deduplicated", False), "smart_schedule": ("steps", None)}[key]
    return np.array([[getattr(layer, name) != usual for layer in layers] for layers in layers_IL])


def drawn_loads(key, seed, iterations, layers):
    """Loads of very different sizes, so that both choices occur."""
    rng = np.random.default_rng(seed)
    shape = (iterations, layers)
    shares = rng.dirichlet(np.full(8, 2.0 if key == "exchange" else 0.4), size=shape)
    pairs = rng.choice(PAIRS[key], size=shape)
    devices = JOBS[key]["devices"]
    sent = rng.poisson(pairs[..., None, None] * shares[:, :, None, :].repeat(devices, axis=2))
    return sent.astype(np.int32) + 1


@both
@examples(10)
@given(SEEDS)
def test_an_iteration_takes_as_long_as_with_the_selected_choice(key, seed):
    """Without replicas, all three place the same experts."""
    counts = drawn_loads(key, seed, 6, 1)
    usual, alternative, by_price = outcomes_of(key, "ep", counts, counts[:1])
    wanted_s = np.where(is_used(key, by_price)[:, 0], alternative.iteration_s, usual.iteration_s)
    np.testing.assert_allclose(by_price.iteration_s, wanted_s, rtol=1e-12)


@pytest.mark.parametrize(
    ("key", "name"), [("exchange", "ep"), ("exchange", "fssdp"), ("smart_schedule", "ep")]
)
@examples(10)
@given(SEEDS)
def test_with_an_exact_forecast_it_never_costs_more(key, name, seed):
    counts = drawn_loads(key, seed, 1, 3)
    usual, alternative, by_price = (run.of_layers("moe_s") for run in outcomes_of(key, name, counts, counts))
    # Experts are placed as for the usual exchange, so only plain expert parallelism has the best of both.
    best = np.minimum(usual, alternative) if name == "ep" else usual
    assert (by_price <= usual + 1e-9).all()
    # The deduplicated exchange must save this share of a layer's seconds.
    least_gain = LEAST_GAIN if key == "exchange" else 0.0
    assert (by_price <= best / (1 - least_gain) + 1e-9).all()


def test_the_deduplicated_exchange_is_not_used_where_it_cannot_pay():
    """With top-1 routing, or with links between nodes that are as fast as 1,000 devices."""
    counts = np.full((2, 1, 4, 8), 100, np.int32)
    slow, fast = cluster_of(nodes=2), {"alpha_s": 0.0, "bandwidth_bytes_per_s": 1e9}

    def used(cluster, **job):
        return is_used("exchange", outcomes_of("exchange", "ep", counts, counts, cluster, **job)[2])

    assert used(slow).all()
    assert not used(slow, top_k=1).any()
    assert not used(cluster_of(nodes=2, inter_node=fast, inter_device=fast)).any()


@both
def test_without_costs_the_usual_choice_is_used(key):
    counts = 100 * drawn_loads(key, 0, 5, 1)
    used_I = is_used(key, outcomes_of(key, "ep", counts, None, CLUSTERS[key])[2])[:, 0]
    assert not used_I[:3].any()  # measured in three iterations
    assert used_I[3:].all()
