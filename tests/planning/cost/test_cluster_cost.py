"""Costs of Parm's collectives, worked out by hand from a cluster's description."""

import pytest

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.planning.cost.cluster_cost import schedule_costs

CLUSTER = {
    "name": "two nodes of two",
    "num_nodes": 2,
    "devices_per_node": 2,
    "intra_node": {"alpha_s": 1e-5, "bandwidth_bytes_per_s": 1e10},
    "inter_node": {"alpha_s": 1e-4, "bandwidth_bytes_per_s": 1e9},
    "expert_flops_per_s": 1e12,
    "non_expert_flops_per_s": 1e12,
}
# Tensor-parallel pairs inside the nodes, expert-parallel pairs between them, all four together.
RANKS = {"mp": (2, 1), "esp": (2, 1), "ep": (2, 0), "ep_esp": (4, 1)}


def test_a_collective_takes_as_long_as_its_slowest_links():
    costs = schedule_costs(ClusterDescription.model_validate(CLUSTER), RANKS)
    gather = costs["all_gather", "mp"]
    assert (gather.alpha_s, gather.beta_s_per_byte) == pytest.approx((1e-5, 1 / 2 / 1e10)), (
        "half of the result is on the device already"
    )
    exchange = costs["all_to_all", "ep"]
    assert (exchange.alpha_s, exchange.beta_s_per_byte) == pytest.approx((1e-4, 1 / 2 / 5e8)), (
        "two devices share a NIC"
    )
    to_parts = costs["all_to_all", "ep_esp"]
    assert to_parts.beta_s_per_byte == pytest.approx(2 / 4 / 5e8), (
        "two of the four devices are on the other node"
    )
    assert costs["overlapped_all_to_all", "ep_esp"] == to_parts, "the prediction assumes no overlap"


def test_measured_collective_costs_replace_link_costs():
    measured = {"row_exchange": {"inter_node": {"alpha_s": 2e-4, "bandwidth_bytes_per_s": 4e8}}}
    cluster = ClusterDescription.model_validate({**CLUSTER, "collectives": measured})
    costs = schedule_costs(cluster, RANKS)
    assert costs["all_to_all", "ep"].alpha_s == 2e-4
    assert costs["all_to_all", "ep"].beta_s_per_byte == pytest.approx(1 / 2 / 4e8), (
        "the measured rate is that of each device"
    )


def test_groups_of_one_rank_cost_nothing_and_are_left_out():
    costs = schedule_costs(ClusterDescription.model_validate(CLUSTER), {"ep": (2, 0), "esp": (1, 0)})
    assert set(costs) == {("all_to_all", "ep")}
