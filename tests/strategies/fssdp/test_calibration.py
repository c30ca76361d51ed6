import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import PROB_BYTES
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.message_size import FixedMessages
from megatron_fssdp.planning.transfer.transfer_plan import additional_transfer, two_level_transfer
from megatron_fssdp.strategies.fssdp.fssdp_strategy import FssdpStrategy
from megatron_fssdp.strategies.fssdp.sparse_materialization import sparse_materialization
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.shipped_strategies import FssdpSettings
from tests.drawn_examples import examples
from tests.planning.placement_cases import (
    brute_force_dispatch_DED,
    owned_layers,
    pairs_traffic,
    random_counts_DE,
    transfer_seconds,
)


def calibrated(planned, counts_DE, topology, profile, *, times, **limits):
    """The placement after the gate, or None if the plan stays."""
    if 0 in limits.values():  # the settings allow neither alone
        limits = {"slots": 0, "overlap_degree": 0}
    strategy = FssdpStrategy(FssdpSettings(planner="hecate", **limits))
    plan = LayerPlan(planned, two_level_transfer(planned, topology))
    context = LayerContext(1, planned.owner_E, topology, profile)
    found = strategy.after_gate(context, counts_DE, plan, times)
    return None if found is plan else found.placement


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
    """Seconds that the placement saves, computed from the dispatch's definition."""
    profile, times = arguments["profile"], arguments["times"]

    def layer_s(of):
        tokens_DD = brute_force_dispatch_DED(counts_DE, of, topology, whole=False).sum(axis=1)
        links, busiest = profile.links, pairs_traffic(tokens_DD, topology)
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
    assert gained_s > -1e-9
    assert gained_s >= full_gain_s - 1e-9
    assert calibrated(planned, counts_DE.copy(), topology, **arguments) == got
