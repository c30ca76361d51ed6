"""The fluid model of an exchange: fair rates, and devices that go on without the others."""

import numpy as np
import pytest

from benchmarks.fluid_exchange import Compute, Exchange, FluidRun, Links, Phase, layer_phases, summed_s

TWO_NODES = Links(np.array([0, 0, 1]), bytes_per_s=1.0)
"""Devices 0 and 1 share a node, and device 2 is alone in another one."""


def bytes_of(*flows: tuple[int, int, float]) -> np.ndarray:
    bytes_DD = np.zeros((3, 3))
    for source, destination, num_bytes in flows:
        bytes_DD[source, destination] = num_bytes
    return bytes_DD


def test_flows_share_the_tightest_link_and_others_get_what_is_left() -> None:
    links = Links(np.array([0, 1, 2]), bytes_per_s=6.0)
    # Two flows into node 2, one of which shares the link out of node 0 with a flow to node 1.
    rates = links.rates(np.array([0, 1, 0]), np.array([2, 2, 1]))
    np.testing.assert_allclose(rates, [3, 3, 3])
    rates = links.rates(np.array([0, 0, 0, 1]), np.array([2, 2, 1, 2]))
    np.testing.assert_allclose(rates, [2, 2, 2, 2])
    rates = links.rates(np.array([0, 1, 1, 0]), np.array([2, 2, 2, 1]))
    np.testing.assert_allclose(rates, [2, 2, 2, 4])


def test_a_device_with_few_rows_sends_results_while_its_neighbour_computes() -> None:
    there = bytes_of((2, 0, 10.0), (2, 1, 2.0))
    phases: list[Phase] = [Exchange(there), Compute(np.array([5.0, 1.0, 0.0])), Exchange(there.T)]
    assert summed_s(phases, TWO_NODES) == pytest.approx(12 + 5 + 12)
    # Device 1 has its rows after 4 s and has returned them after 7 s. Device 0 has its rows after 12 s.
    assert FluidRun(phases, TWO_NODES).seconds() == pytest.approx(12 + 5 + 10)


def test_equal_devices_end_their_phases_together() -> None:
    links = Links(np.arange(8) // 2, bytes_per_s=100.0)
    forward, backward = layer_phases(np.full((8, 8), 16.0), 4, 0.01, np.full(8, 0.5))
    phases = [*forward, *forward, *backward, *backward]
    # Two devices send 16 pairs of 4 bytes to each of 6 devices: 7.68 s, eight times.
    expected_s = 8 * 7.68 + 2 * 3 * (0.5 + 1.28)
    assert summed_s(phases, links) == pytest.approx(expected_s)
    assert FluidRun(phases, links).seconds() == pytest.approx(expected_s)


def test_no_device_begins_before_all_its_rows_have_arrived() -> None:
    phases: list[Phase] = [
        Compute(np.array([0.0, 0.0, 3.0])),
        Exchange(bytes_of((2, 0, 4.0))),
        Compute(np.array([1.0, 0.0, 0.0])),
    ]
    assert FluidRun(phases, TWO_NODES).seconds() == pytest.approx(3 + 4 + 1)
