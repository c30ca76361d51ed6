import numpy as np
import pytest

from megatron_fssdp.planning.cost.host_seconds import MEASURED, SIZES, HostCosts
from megatron_fssdp.planning.transfer.message_size import BATCH_HOST_S
from tests.simulation.small_jobs import loads, outcome_of

COUNTS_ILDE = loads([[8, 0], [8, 0]], [[8, 0], [8, 0]], layers=2)


def ms(seconds):
    return (1e3 * seconds,) * len(SIZES)


def with_host(name, host, **job):
    return outcome_of(name, COUNTS_ILDE, host=host, **job)


def test_the_device_waits_for_the_dispatch_and_for_plans_with_exact_counts():
    host = HostCosts({"quota": ms(0.01)}, {"quota": ms(0.2)}, {"quota": ms(0.03)})
    without = with_host("quota", None)
    outcome = with_host("quota", host)
    # Two layers, one micro-batch.
    assert outcome.parts_s["host"] == pytest.approx([2 * 0.23] * 2)
    assert outcome.iteration_s == pytest.approx(without.iteration_s + 2 * 0.23)
    assert outcome.host_s == pytest.approx(2 * 0.24)
    assert ("host", "plan layer 1") in {span[:2] for span in outcome.spans(0)}
    twice = with_host("quota", host, num_micro_batches=2)
    assert twice.parts_s["host"] == pytest.approx([4 * 0.23] * 2)


def test_an_iterations_plan_is_hidden_until_the_host_is_the_bottleneck():
    without = with_host("ep", None).iteration_s
    assert with_host("ep", HostCosts({"ep": ms(0.01)})).iteration_s == pytest.approx(without)
    slow = with_host("ep", HostCosts({"ep": ms(100.0)}))
    assert slow.iteration_s == pytest.approx([200.0] * 2)
    assert slow.parts_s["host"] == pytest.approx(200.0 - without)


def test_devices_wait_for_the_part_of_the_plans_that_each_rank_makes():
    # Two layers, and two devices that each plan one of them.
    outcome = with_host("prophet", HostCosts({"prophet": ms(0.3)}))
    assert outcome.parts_s["host"] == pytest.approx([0.3] * 2)
    assert outcome.iteration_s == pytest.approx(with_host("prophet", None).iteration_s + 0.3)
    assert ("host", "plans") in {span[:2] for span in outcome.spans(0)}


def test_messages_of_transfers_are_posted_by_the_host():
    keys = {"slots": 1, "overlap_degree": 1, "overlap": False, "reshard_interval": 0}
    outcome = outcome_of("fssdp", COUNTS_ILDE, keys=keys)
    # One message each for spAG and spRS of one expert, in both layers.
    assert outcome.of_layers("replicas").tolist() == [[1, 1], [1, 1]]
    assert outcome.of_layers("host_s").sum(axis=1) == pytest.approx([4 * BATCH_HOST_S] * 2)


def test_measured_times_are_interpolated():
    costs = HostCosts({"ep": (1.0, 2.0, 2.0, 2.0, 2.0, 4.0)})
    (few, many), (first, last) = SIZES[-2:], (SIZES[0], SIZES[-1])
    assert costs.of_layer("ep", *first).before_gate_s == pytest.approx(1e-3)
    assert costs.of_layer("ep", 2, 2).before_gate_s == pytest.approx(1e-3)
    assert costs.of_layer("ep", *last).before_gate_s == pytest.approx(4e-3)
    slope = np.log(2) / np.log(many[0] * many[1] / (few[0] * few[1]))
    assert costs.of_layer("ep", last[0], 2 * last[1]).before_gate_s == pytest.approx(4e-3 * 2**slope)
    assert costs.of_layer("other", *first).before_gate_s == 0.0
    for table in (MEASURED.before_gate_ms, MEASURED.after_gate_ms, MEASURED.correction_ms):
        assert all(len(measured) == len(SIZES) for measured in table.values())
