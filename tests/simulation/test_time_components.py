from dataclasses import replace

import numpy as np
import pytest

from megatron_fssdp.planning.memory import ExpertOptimizer
from megatron_fssdp.simulation.simulator import balanced_counts
from tests.simulation.small_jobs import cluster_of, loads, outcome_of

HOT = [[6, 2], [6, 2]]  # two sources, expert 0 gets 12 of 16
REPLICATE = {"slots": 1, "overlap_degree": 1, "reshard_interval": 0}


def seconds(outcome, iteration=0):
    return {part: float(times[iteration]) for part, times in outcome.parts_s.items() if times[iteration]}


def test_plain_expert_parallelism_in_one_node_takes_the_expected_time():
    outcome = outcome_of("ep", loads(HOT))
    # Device 1 sends 6 rows to device 0; device 0 sends 2. Counts of 2 experts, 8 bytes each, from one other.
    dispatch, combine, counts = 6 * 10 / 1000, 6 * 6 / 1000, 2 * 8 / 1000
    assert seconds(outcome) == pytest.approx(
        {
            "other compute": 3 * 20 / 5,
            "experts": 3 * 12 * 3 / 10,
            "all-to-all": 2 * (dispatch + combine) + counts,
        }
    )
    assert outcome.tokens_ILD.tolist() == [[[12, 4]]]
    assert outcome.iteration_s[0] == pytest.approx(sum(seconds(outcome).values()))


# With 4 devices in 2 nodes, all tokens of node 1 go to expert 0 in node 0: 16 rows over one NIC.
TWO_NODES = [[4, 0, 4, 0], [4, 0, 4, 0], [8, 0, 0, 0], [8, 0, 0, 0]]


@pytest.mark.parametrize(
    ("fitted_bytes_per_s", "longer_s"),
    [
        # All exchange 12 rows with start-ups at 40 bytes/s a node, and the link needs 100 bytes/s for them.
        (20, 12 * (10 + 6) * (1 / 40 - 1 / 100) + (2 + 1) * 0.25),
        # A fitted rate cannot exceed the NIC's own.
        (1000, 0),
    ],
)
def test_a_fitted_all_to_all_counts_as_far_as_all_links_are_busy(fitted_bytes_per_s, longer_s):
    """Devices share the NIC of their node: 16 rows in the busier one, and on average 24 / 2, 3/4 of that."""
    fitted = {"all_to_all": {"inter_node": {"alpha_s": 0.25, "bandwidth_bytes_per_s": fitted_bytes_per_s}}}
    cluster = cluster_of(nodes=2, far_alpha_s=0.1, collectives=fitted)
    outcome = outcome_of("ep", loads(TWO_NODES), cluster=cluster)
    rows_s = 16 * (10 + 6) / 100 + 3 / 4 * longer_s + 1 / 4 * (2 + 1) * 0.1
    assert seconds(outcome)["all-to-all"] == pytest.approx(2 * rows_s + 0.1 + 2 * 4 * 8 / 100)
    assert outcome.of_layers("cross_node").tolist() == [[24]]


def test_a_replica_takes_load_and_its_transfer_is_hidden():
    outcome = outcome_of("fssdp", loads(HOT, HOT), keys=REPLICATE)
    # Expert 0 is on both devices: 6 + 2 of device 1, 2 sent by device 0. At first it comes after the gate.
    assert outcome.of_layers("replicas").tolist() == [[1], [1]]
    assert outcome.of_layers("addition_s").tolist() == [[0.1], [0.0]]
    assert outcome.tokens_ILD.tolist() == [[[6, 10]]] * 2
    assert seconds(outcome, 1) == pytest.approx(
        {
            "other compute": 12,
            "experts": 3 * 10 * 3 / 10,
            "all-to-all": 2 * 2 * (10 + 6) / 1000 + 2 * 8 / 1000,
        }
    )


def test_resharding_moves_weights_masters_and_states():
    optimizer = ExpertOptimizer(num_state_tensors=2, has_master_weights=True)
    counts = loads(*[[[6, 6, 0, 0], [6, 6, 0, 0]]] * 3)
    keys = {"slots": 0, "overlap_degree": 0, "reshard_interval": 2}
    outcome = outcome_of("fssdp", counts, keys=keys, optimizer=optimizer)
    assert outcome.moved_I.tolist() == [0, 0, 2]
    # One expert in each direction: 50 elements of 2 + 4 + 8 bytes.
    assert seconds(outcome, 2)["re-sharding"] == pytest.approx(50 * 14 / 1000)
    assert outcome.tokens_ILD[2].tolist() == [[12, 12]]
    shared = {"optimizer": replace(optimizer, is_distributed=True), "expert_data_parallel_size": 4}
    parted = outcome_of("fssdp", counts, keys=keys, **shared)
    # A rank's part of 50 elements' states is 13 of them, padding rounded up.
    assert seconds(parted, 2)["re-sharding"] == pytest.approx((50 * 2 + 13 * 12) / 1000)


def test_compute_outside_moe_layers_and_gradient_synchronization_take_time():
    outcome = outcome_of(
        "ep",
        loads(HOT),
        before_layer_flops_L=(5.0,),
        after_layers_flops=10.0,
        dense_elements=100,
        data_parallel_size=2,
        expert_data_parallel_size=3,
        reduces_at_end=True,
    )
    assert seconds(outcome)["other compute"] == pytest.approx(3 * (20 + 5 + 10) / 5)
    # Half of twice 400 bytes to the other rank, and two thirds of twice an expert's 200 bytes.
    assert seconds(outcome)["gradient sync"] == pytest.approx(2 * (400 / 2 + 200 * 2 / 3) / 1000)


def test_the_ceiling_is_simulated_with_balanced_routing():
    balanced = balanced_counts(loads(HOT, [[8, 0], [0, 8]]))
    assert balanced.tolist() == [[[[4, 4], [4, 4]]]]
    ideal = outcome_of("ep", balanced)
    assert ideal.mean_s == pytest.approx(12 + 3 * 8 * 3 / 10 + 2 * 4 * 16 / 1000 + 16 / 1000)
    ragged = balanced_counts(np.array([[[[3, 0, 0, 0], [1, 0, 0, 1]]]]))
    assert ragged.sum(axis=3).tolist() == [[[3, 2]]]
    assert ragged.sum(axis=2).max() - ragged.sum(axis=2).min() <= 1
