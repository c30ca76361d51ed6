import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.cost.link_seconds import (
    LinkTimes,
    SteppedExchange,
    moves_traffic,
    transfer_traffic,
)
from megatron_fssdp.planning.placement.topology import GroupRing, Topology
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from tests.planning.placement_cases import pairs_traffic, placements


@given(placements())
def test_traffic_of_a_transfer_is_that_of_its_edges(case):
    topology, placement = case
    plan = two_level_transfer(placement, topology)
    experts_DD = np.zeros((topology.num_devices,) * 2, int)
    np.add.at(experts_DD, tuple(plan.table[:, 1:3].T), 1)
    moved = transfer_traffic(plan, topology)
    assert moved.busiest == pairs_traffic(experts_DD, topology)
    assert moved.busiest == moves_traffic(plan.table[:, 1], plan.table[:, 2], topology)
    assert moved.num_experts == len(plan.table)
    assert sum(moved.fill_hops) <= max(plan.max_depth, 0)


SECONDS = st.floats(0, 10)


def times(near_s, far_s, start_s=0.0):
    return LinkTimes(np.array(near_s), np.array(far_s), start_s, start_s)


def test_one_node_has_only_links_inside():
    exchange = times(6.0, 0.0)
    # Own rows at once, then three others of 2 s. S ends at 0, 2, 4, 6; C at 3, 6, 9, 12; R at 6, 8, 11, 14.
    assert SteppedExchange(4, between_nodes=False).seconds(exchange, exchange, 12.0) == 14.0


def test_every_step_pays_start_up_and_host():
    """Three groups; a start-up of 1 s is part of both exchanges, and the host needs 0.5 s for each step.

    S ends at 2.5 (inside), 2.5 + 1 + 4 + 0.5 = 8 and 13.5; C takes 2 + 0.5 and ends at 5, 10.5 and 16; R ends
    at 16 (behind all S), 21.5 and 27.
    """
    exchange = times(2.0, 9.0, start_s=1.0)
    assert SteppedExchange(3, between_nodes=True, host_s=0.5).seconds(exchange, exchange, 6.0) == 27.0
    # Links without rows have no start-up.
    assert SteppedExchange(3, between_nodes=True).seconds(times(0, 0, 1.0), times(0, 0, 1.0), 6.0) == 6.0


def test_steps_follow_from_the_ring():
    topology = Topology((0, 0, 1, 1))
    assert SteppedExchange.of(GroupRing.of(0, topology), topology) == SteppedExchange(2, between_nodes=True)
    assert SteppedExchange.of(GroupRing(0, 4, 4), topology) is None, "one group has nothing to wait for"


@given(near_s=SECONDS, far_s=SECONDS, experts_s=SECONDS, start_s=SECONDS, host_s=SECONDS, n=st.integers(2, 9))
def test_the_decision_takes_the_fewer_seconds(near_s, far_s, experts_s, start_s, host_s, n):
    dispatch, combine = times(near_s + start_s, far_s + start_s, start_s), times(near_s, far_s)
    steps = SteppedExchange(n, between_nodes=True, host_s=host_s)
    at_once_s = 2 * (dispatch.seconds + combine.seconds) + 3 * experts_s
    in_steps_s = steps.seconds(dispatch, combine, experts_s) + steps.seconds(combine, dispatch, 2 * experts_s)
    chosen_s = in_steps_s if steps.saves(dispatch, combine, experts_s) else at_once_s
    assert chosen_s <= min(in_steps_s, at_once_s) * (1 + 1e-12)  # Sums differ by rounding.
    # More start-ups and more work of the host never make steps cheaper.
    free = SteppedExchange(n, between_nodes=True)
    without = times(near_s, far_s)
    assert free.seconds(without, combine, experts_s) <= steps.seconds(dispatch, combine, experts_s) + 1e-9
