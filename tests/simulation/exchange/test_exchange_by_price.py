"""Layers whose tokens travel once to each node only where modelled seconds say so, simulated."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.simulation.simulator import StrategyOutcome, simulate
from tests.drawn_examples import examples
from tests.simulation.small_jobs import cluster_of, job_of, settings_of

DEVICES, EXPERTS, TOP_K = 4, 8, 4
KEYS = {"fssdp": {"slots": 1, "overlap_degree": EXPERTS, "reshard_interval": 0}, "ep": {}}


def outcomes_of(
    name: str,
    counts: np.ndarray,
    past: np.ndarray,
    cluster: ClusterDescription,
    top_k: int = TOP_K,
    **keys: object,
) -> list[StrategyOutcome]:
    """Outcomes of the usual exchange, of the deduplicated one, and by price."""
    job = job_of(
        devices=DEVICES,
        experts=EXPERTS,
        layers=counts.shape[1],
        top_k=top_k,
        tokens_per_micro_batch=256,
        token_bytes=600,
    )
    return [
        simulate(
            name,
            settings_of(name, exchange=exchange, **KEYS[name], **keys),
            counts,
            cluster,
            job,
            past_ILDE=past,
        )
        for exchange in ("megatron", "deduplicated", "by_price")
    ]


def drawn_loads(seed: int, iterations: int, layers: int) -> np.ndarray:
    """Loads of very different sizes, so that both exchanges occur."""
    rng = np.random.default_rng(seed)
    shape = (iterations, layers)
    shares = rng.dirichlet(np.full(EXPERTS, 2.0), size=shape)
    pairs = rng.choice([2, 40, 800], size=shape)
    sent = rng.poisson(pairs[..., None, None] * shares[:, :, None, :].repeat(DEVICES, axis=2))
    return sent.astype(np.int32) + 1


@examples(10)
@given(st.integers(0, 2**32 - 1))
def test_an_iteration_takes_as_long_as_with_the_selected_exchange(seed: int) -> None:
    """Without replicas, all three place the same experts."""
    cluster = cluster_of(nodes=2, per_node=2, far_alpha_s=100.0)
    counts = drawn_loads(seed, 6, 1)
    pairs, once, by_price = outcomes_of("ep", counts, counts[:1], cluster)
    used_I = by_price.ledger.deduplicated_IL[:, 0]
    wanted_s = np.where(used_I, once.iteration_s, pairs.iteration_s)
    np.testing.assert_allclose(by_price.iteration_s, wanted_s, rtol=1e-12)


@examples(10)
@given(st.integers(0, 2**32 - 1))
def test_with_an_exact_forecast_it_never_costs_more_than_the_usual_exchange(seed: int) -> None:
    counts = drawn_loads(seed, 1, 3)
    for name in KEYS:
        cluster = cluster_of(nodes=2, per_node=2, far_alpha_s=100.0)
        pairs, _, by_price = outcomes_of(name, counts, counts, cluster)
        assert (by_price.layers.moe_s() <= pairs.layers.moe_s() + 1e-9).all()


def test_layers_differ_and_change() -> None:
    counts = drawn_loads(1, 12, 2)
    cluster = cluster_of(nodes=2, per_node=2, far_alpha_s=100.0)
    used_IL = outcomes_of("ep", counts, counts[:1], cluster)[2].ledger.deduplicated_IL
    assert (used_IL[:, 0] != used_IL[:, 1]).any()
    assert (used_IL[1:] != used_IL[:-1]).any()


def test_it_is_not_used_where_it_cannot_pay() -> None:
    """With top-1 routing, or with links between nodes that are as fast as 1,000 devices."""
    counts = np.full((2, 1, DEVICES, EXPERTS), 100, np.int32)
    slow, fast = cluster_of(nodes=2, per_node=2), {"alpha_s": 0.0, "bandwidth_bytes_per_s": 1e9}
    assert outcomes_of("ep", counts, counts, slow)[2].ledger.deduplicated_IL.all()
    assert not outcomes_of("ep", counts, counts, slow, top_k=1)[2].ledger.deduplicated_IL.any()
    cluster = cluster_of(nodes=2, per_node=2, inter_node=fast)
    assert not outcomes_of("ep", counts, counts, cluster)[2].ledger.deduplicated_IL.any()


def test_without_costs_tokens_travel_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.full((4, 1, DEVICES, EXPERTS), 100, np.int32)
    job = job_of(devices=DEVICES, experts=EXPERTS, top_k=TOP_K, token_bytes=600)
    monkeypatch.setenv("FSSDP_PROFILE_ITERATIONS", "2")
    settings = settings_of("ep", exchange="by_price")
    outcome = simulate("ep", settings, counts, cluster_of(nodes=2, per_node=2), job)
    assert outcome.ledger.deduplicated_IL[:, 0].tolist() == [False, False, True, True]
