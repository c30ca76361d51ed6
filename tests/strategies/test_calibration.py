"""Calibration adds replicas only where the modelled gain is positive, and only within the limits."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.config.strategy.shipped_settings import FssdpSettings
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import PROB_BYTES
from megatron_fssdp.planning.cost.link_seconds import plain_links
from megatron_fssdp.planning.papers.sparse_materialization import sparse_materialization
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import FixedMessages
from megatron_fssdp.planning.transfer.transfer_plan import additional_transfer, two_level_transfer
from megatron_fssdp.strategies.fssdp import FssdpStrategy
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from tests.drawn_examples import examples
from tests.planning.cost.dense_traffic import pairs_traffic
from tests.planning.cost.transfer_cost import transfer_seconds
from tests.planning.placement_cases import (
    brute_force_dispatch_DED,
    owned_layers,
    placement_price,
    random_counts_DE,
)
from tests.support.random_placement import with_replicas

MEGA = 10**6
# A second a megabyte inside a node and ten across, a second a flop. Probabilities and router counts, some
# bytes, take next to nothing.
SLOW = ClusterCost(LinkCost(0.0, 1e-6), LinkCost(0.0, 1e-5), expert_flops_per_s=1.0)
PROFILE = LayerProfile(
    non_moe_s=0.0, cluster=SLOW, expert_bytes=MEGA, token_bytes=MEGA, flops_per_token=1.0, memory_capacity=8
)


def calibrated(planned, counts_DE, topology, profile, *, times=1, hides=True, rematerialize=False, **limits):
    """The placement after the gate, or None if the plan stays."""
    keys = {"slots": 1, "overlap_degree": 1, **limits}
    if 0 in keys.values():  # the settings allow neither alone
        keys = {"slots": 0, "overlap_degree": 0}
    elif not hides or rematerialize:
        keys |= {"overlap": hides, "rematerialize": rematerialize}
    strategy = FssdpStrategy(FssdpSettings(planner="hecate", **keys))
    plan = LayerPlan(
        planned,
        two_level_transfer(planned, topology),
        gather_ahead=hides,
        rematerialize=rematerialize,
    )
    context = LayerContext(1, planned.owner_E, topology, profile)
    found = strategy.after_gate(context, np.array(counts_DE), plan, times)
    return None if found is plan else found.placement


def calibrate(planned, counts_DE, topology, *, megabytes, gradient_megabytes=None, non_moe_s=0.0, **changed):
    profile = replace(
        PROFILE,
        non_moe_s=non_moe_s,
        expert_bytes=megabytes * MEGA,
        gradient_bytes=None if gradient_megabytes is None else gradient_megabytes * MEGA,
    )
    return calibrated(planned, counts_DE, topology, profile, **changed)


def test_gains_of_a_layer_equal_those_worked_out_by_hand():
    # Both devices send their 10 tokens to expert 0 on device 0: all-to-alls 4 * 10 s, experts 3 * 20 s.
    # With a replica on device 1: no all-to-all, experts 3 * 10 s; 70 s less.
    planned = ExpertPlacement.owners_only(np.array([0, 1]), 2)
    counts_DE, topology = [[10, 0], [10, 0]], Topology.uniform(2, 1)
    everywhere = with_replicas(planned, [(0, 1)])
    for placement, seconds in ((planned, 100.0), (everywhere, 30.0)):
        price = placement_price(np.array(counts_DE), placement, topology, PROFILE)
        assert float(price.all_to_all_s + price.experts_s) == pytest.approx(seconds, abs=1e-3)
    # The expert travels to device 1 and its gradient back.
    assert calibrate(planned, counts_DE, topology, megabytes=34) == everywhere
    assert calibrate(planned, counts_DE, topology, megabytes=36) is None
    assert calibrate(planned, counts_DE, topology, megabytes=36, times=2) == everywhere
    assert calibrate(planned, counts_DE, topology, megabytes=71, times=2) is None
    # A gradient of twice the bytes; a reduction that hides under the backward pass of the compute before.
    assert calibrate(planned, counts_DE, topology, megabytes=23, gradient_megabytes=46) == everywhere
    assert calibrate(planned, counts_DE, topology, megabytes=24, gradient_megabytes=48) is None
    assert calibrate(planned, counts_DE, topology, megabytes=69, non_moe_s=69 / 2) == everywhere
    assert calibrate(planned, counts_DE, topology, megabytes=69, non_moe_s=67 / 2) is None
    assert calibrate(planned, counts_DE, topology, megabytes=69, non_moe_s=69 / 2, hides=False) is None


def test_rematerialized_additions_travel_with_every_pass():
    """Two micro-batches save 140 s. Each gathers twice, the first time of all as an addition, and reduces."""
    planned = ExpertPlacement.owners_only(np.array([0, 1]), 2)
    counts_DE, topology = [[10, 0], [10, 0]], Topology.uniform(2, 1)
    keys = {"times": 2, "rematerialize": True}
    assert calibrate(planned, counts_DE, topology, megabytes=23, **keys) is not None
    assert calibrate(planned, counts_DE, topology, megabytes=24, **keys) is None


@st.composite
def calibrations(draw):
    """(planned, counts_DE, topology, arguments) of a layer planned from other counts."""
    topology, owner_E = draw(owned_layers())
    num_devices, num_experts = topology.num_devices, owner_E.size
    before_DE, counts_DE = (
        random_counts_DE(draw(st.integers(0, 2**32 - 1)), num_devices, num_experts) for _ in range(2)
    )
    limits = {"overlap_degree": draw(st.integers(0, num_experts)), "slots": draw(st.integers(0, 4))}
    fewer = {**limits, "slots": draw(st.integers(0, limits["slots"]))}
    planned = sparse_materialization(owner_E, before_DE.sum(axis=0), topology, **fewer)
    arguments = {
        **limits,
        "profile": LayerProfile(
            non_moe_s=draw(st.sampled_from([0.0, 30.0])),
            cluster=ClusterCost(LinkCost(2.0, 1.0), LinkCost(5.0, 3.0), expert_flops_per_s=1.0),
            expert_bytes=draw(st.sampled_from([1, 20, 200])),
            token_bytes=1,
            flops_per_token=draw(st.sampled_from([0.0, 1.0, 10.0])),
            memory_capacity=8,
            messages=FixedMessages(20),
        ),
        "times": draw(st.integers(1, 3)),
    }
    return planned, counts_DE, topology, arguments


def gain_s(planned, placement, counts_DE, topology, arguments):
    """Seconds that the placement saves, computed from the dispatch token by token."""
    profile, times = arguments["profile"], arguments["times"]
    cluster = profile.cluster

    def layer_s(of):
        tokens_DD = brute_force_dispatch_DED(counts_DE, of, topology).sum(axis=1)
        links, busiest = plain_links(cluster), pairs_traffic(tokens_DD, topology)
        rows_s = links.times(busiest, profile.token_bytes + PROB_BYTES, starts=2).seconds
        all_to_alls_s = 2 * (rows_s + links.times(busiest, profile.token_bytes).seconds)
        return all_to_alls_s + 3 * tokens_DD.sum(axis=0).max() * profile.flops_per_token

    def transfer_s(plan):
        return transfer_seconds(plan, profile.expert_bytes, topology, profile)

    saved_s = times * (layer_s(planned) - layer_s(placement))
    gather_s = transfer_s(additional_transfer(planned, placement, topology))
    reductions_s = [
        max(0.0, transfer_s(two_level_transfer(of, topology)) - 2 * profile.non_moe_s)
        for of in (planned, placement)
    ]
    return saved_s - gather_s - (reductions_s[1] - reductions_s[0])


@examples(200)
@given(calibrations())
def test_calibration_keeps_its_limits_and_always_gains(case):
    planned, counts_DE, topology, arguments = case
    overlap_degree, slots = arguments["overlap_degree"], arguments["slots"]
    got = calibrated(planned, counts_DE, topology, **arguments)
    wanted = sparse_materialization(
        planned.owner_E, counts_DE.sum(axis=0), topology, overlap_degree=overlap_degree, slots=slots
    )
    union_ED = planned.present_ED | wanted.present_ED
    full_gain_s = 0.0
    if (union_ED.sum(axis=0) - planned.owned_per_device_D <= slots).all():
        union = ExpertPlacement(planned.owner_E, union_ED)
        full_gain_s = gain_s(planned, union, counts_DE, topology, arguments)
    if got is None:
        assert full_gain_s <= 1e-9
        return
    assert np.array_equal(got.owner_E, planned.owner_E)
    assert (got.present_ED >= planned.present_ED).all()
    assert (got.present_ED <= union_ED).all()
    assert int(got.replicas_per_device_D.max()) <= slots
    assert np.count_nonzero((got.present_ED != planned.present_ED).any(axis=1)) <= overlap_degree
    gained_s = gain_s(planned, got, counts_DE, topology, arguments)
    assert gained_s > 0
    assert gained_s >= full_gain_s - 1e-9
    assert calibrated(planned, counts_DE.copy(), topology, **arguments) == got
