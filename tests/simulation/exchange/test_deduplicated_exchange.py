from math import comb

import numpy as np
import pytest

from megatron_fssdp.cli.analysis.simulated_loads import recorded_choices
from megatron_fssdp.planning.cost.deduplicated_traffic import TokenChoices
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.records.loads import RecordedLoads

from ..small_jobs import cluster_of, loads, outcome_of

DEVICES, EXPERTS, TOKENS = 4, 8, 16
DEDUPLICATED = {"exchange": "deduplicated"}


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_balanced_loads_cost_the_hypergeometric_number_of_tokens(top_k):
    job = {"top_k": top_k, "tokens_per_micro_batch": TOKENS}
    counts = loads(np.full((DEVICES, EXPERTS), TOKENS * top_k // EXPERTS))
    outcome = outcome_of("ep", counts, keys=DEDUPLICATED, **job)
    to_node, to_device = (
        TOKENS * (1 - comb(EXPERTS - EXPERTS // places, top_k) / comb(EXPERTS, top_k)) for places in (2, 4)
    )
    # Both devices of a node send to the other node. A relay passes on what both sources sent to it.
    tokens = np.array([2 * to_node / 100, 2 * to_device / 1000])
    dispatch_s, combine_s = tokens.sum() * (6 + 8 * top_k), tokens.sum() * 6
    counts_s = outcome.parts_s["all-to-all"][0] - 2 * (dispatch_s + combine_s)
    plain = outcome_of("ep", counts, **job)
    pairs = TOKENS * top_k
    plain_s = 2 * pairs / 2 / 100 * (6 + 4 + 6)
    assert counts_s == pytest.approx(plain.parts_s["all-to-all"][0] - 2 * plain_s)
    assert outcome.of_layers("cross_node")[0, 0] == round(DEVICES * to_node)


@pytest.mark.parametrize("exchange", ["megatron", "by_price"])
def test_the_fused_dispatcher_sends_tokens_and_its_hops_overlap(exchange):
    """``flex`` in the run's YAML: tokens in place of pairs, the slower of both hops, one kernel each way."""
    choices = TokenChoices(4, is_fused=True)
    cluster = cluster_of(nodes=2, far_alpha_s=0.25)
    job = {"cluster": cluster, "top_k": 4, "tokens_per_micro_batch": TOKENS, "choices": choices}
    counts = loads(np.full((DEVICES, EXPERTS), TOKENS * 4 // EXPERTS))
    outcome = outcome_of("ep", counts, keys={"exchange": exchange}, **job)
    to_node = TOKENS * (1 - comb(4, 4) / comb(8, 4))
    layer = outcome.iterations[0].micro_batches[0][0]
    assert layer.deduplicated
    assert layer.dispatch.seconds == pytest.approx(0.25 + 2 * to_node / 100 * (6 + 8 * 4))
    assert layer.combine.seconds == pytest.approx(0.25 + 2 * to_node / 100 * 6)
    with pytest.raises(ValueError, match="flex sends the tokens itself; remove exchange"):
        outcome_of("ep", counts, keys=DEDUPLICATED, **job)


def recorded(counts_ILDE, *histograms):
    return RecordedLoads(counts_ILDE, np.arange(1, len(counts_ILDE) + 1), np.array([1]), *histograms)


def test_records_correct_the_estimate():
    """Tokens whose experts are all on one device: loads alone would say that they go everywhere."""
    topology = Topology.uniform(DEVICES, 2)
    counts = loads(*[np.full((DEVICES, EXPERTS), 4)] * 2)
    tokens = DEVICES * EXPERTS * 4 // 2
    on_one = np.array([[[tokens, 0]], [[0, 0]]]), np.array([[[tokens, 0, 0, 0]], [[0, 0, 0, 0]]])
    choices = recorded_choices(recorded(counts, *on_one), topology, 2)
    estimated = [2 * (1 - comb(4, 2) / comb(8, 2)), 4 * (1 - comb(6, 2) / comb(8, 2))]
    assert choices is not None
    assert (choices.node_factor, choices.device_factor) == pytest.approx([1 / number for number in estimated])
    # Every token now goes to one of two nodes, and the exchange sends one row for its two pairs.
    job = {"top_k": 2, "tokens_per_micro_batch": 16, "choices": choices}
    outcome = outcome_of("ep", counts, keys=DEDUPLICATED, **job)
    assert outcome.of_layers("cross_node")[0, 0] == tokens / 2


def test_records_that_do_not_fit_are_not_used():
    counts = loads(np.full((DEVICES, EXPERTS), 4))
    by_nodes, by_devices = np.ones((1, 1, 2), np.int64), np.ones((1, 1, DEVICES), np.int64)
    two_nodes = Topology.uniform(DEVICES, 2)
    record = recorded(counts, by_nodes, by_devices)
    assert isinstance(recorded_choices(record, two_nodes, 2), TokenChoices)
    assert recorded_choices(record, Topology.uniform(DEVICES, 4), 2) is None
    assert recorded_choices(recorded(counts, 0 * by_nodes, by_devices), two_nodes, 2) is None
    assert recorded_choices(recorded(counts), two_nodes, 2) is None
