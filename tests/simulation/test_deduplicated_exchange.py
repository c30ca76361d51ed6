"""The simulated deduplicated exchange, worked out by hand: tokens in two hops, one after the other."""

from math import comb

import numpy as np
import pytest

from megatron_fssdp.simulation.simulator import simulate

from .small_jobs import cluster_of, job_of, loads, settings_of

DEVICES, EXPERTS, TOKENS = 4, 8, 16


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_balanced_loads_cost_the_hypergeometric_number_of_tokens(top_k: int) -> None:
    cluster = cluster_of(nodes=2, per_node=2)
    job = job_of(devices=DEVICES, experts=EXPERTS, top_k=top_k, tokens_per_micro_batch=TOKENS)
    counts = loads(np.full((DEVICES, EXPERTS), TOKENS * top_k // EXPERTS).tolist())
    outcome = simulate("ep", settings_of("ep", exchange="deduplicated"), counts, cluster, job)
    to_node, to_device = (
        TOKENS * (1 - comb(EXPERTS - EXPERTS // places, top_k) / comb(EXPERTS, top_k)) for places in (2, 4)
    )
    # Both devices of a node send to the other node. A relay passes on what both sources sent to it.
    tokens = np.array([2 * to_node / 100, 2 * to_device / 1000])
    dispatch_s, combine_s = tokens.sum() * (6 + 8 * top_k), tokens.sum() * 6
    counts_s = outcome.parts_s["all-to-all"][0] - 2 * (dispatch_s + combine_s)
    plain = simulate("ep", settings_of("ep"), counts, cluster, job)
    pairs = TOKENS * top_k
    plain_s = 2 * pairs / 2 / 100 * (6 + 4 + 6)
    assert counts_s == pytest.approx(plain.parts_s["all-to-all"][0] - 2 * plain_s)
    assert outcome.ledger.cross_node_IL[0, 0] == round(DEVICES * to_node)


def test_strategies_price_it_and_replicas_still_help() -> None:
    rng = np.random.default_rng(0)
    cluster = cluster_of(nodes=2, per_node=2)
    job = job_of(devices=DEVICES, experts=EXPERTS, top_k=4, tokens_per_micro_batch=256, token_bytes=600)
    heat = np.array([2.5, 2.5, 1, 1, 1, 1, 1, 1])
    counts = np.stack([rng.multinomial(1024, heat / heat.sum(), size=(1, DEVICES)) for _ in range(8)])
    seconds = {
        (name, exchange): simulate(
            name,
            settings_of(name, exchange=exchange, **({} if name == "ep" else {"slots": 1})),
            counts,
            cluster,
            job,
        )
        .iteration_s[3:]
        .mean()
        for name in ("ep", "fssdp", "prophet")
        for exchange in ("pairs", "deduplicated")
    }
    for name in ("ep", "fssdp", "prophet"):
        assert seconds[name, "deduplicated"] < seconds[name, "pairs"]
    assert seconds["fssdp", "deduplicated"] < seconds["ep", "deduplicated"]
