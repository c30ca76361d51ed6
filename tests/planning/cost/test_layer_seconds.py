"""The pieces of a layer's price, by hand. The whole is compared with the simulator in tests/simulation."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import transfer_times
from megatron_fssdp.planning.cost.link_seconds import transfer_traffic
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import FixedMessages
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import plan_price
from tests.support.random_placement import plain_transfer

FAST = ClusterCost(LinkCost(0.0, 1.0), LinkCost(0.0, 10.0), expert_flops_per_s=100.0)
PROFILE = LayerProfile(0.0, FAST, expert_bytes=3, token_bytes=1, flops_per_token=1.0, memory_capacity=1)


def test_a_transfer_takes_as_long_as_its_busiest_link():
    topology = Topology.uniform(4, 2)
    placement = ExpertPlacement(np.array([0]), np.ones((1, 4), dtype=bool))
    star, tree = plain_transfer(placement), two_level_transfer(placement, topology)

    def seconds(transfer, profile):
        traffic = transfer_traffic(transfer, topology)
        return transfer_times(profile.links, traffic, 3, profile.messages).seconds

    assert seconds(star, profile=PROFILE) == 60.0  # crosses twice
    # Crosses once; one hop between nodes comes before the last one, and its first message is 3 or 1 bytes.
    assert seconds(tree, profile=PROFILE) == 30.0 + 30.0
    slow_start = replace(PROFILE, cluster=ClusterCost(LinkCost(1.0, 1.0), LinkCost(2.0, 10.0), 1.0))
    assert seconds(tree, profile=replace(slow_start, messages=FixedMessages(1))) == 32.0 + 12.0
    assert seconds(plain_transfer(ExpertPlacement.owners_only(np.array([0]), 4)), profile=slow_start) == 0.0


@pytest.mark.parametrize(
    ("ways", "gather_s", "reduce_s"),
    [
        # 10 s of weights and 20 s of sums; 3 s of compute and 1 s of counts before the layer, 6 s backward.
        ({}, 10 - 4, 20 - 6),
        # To the owners and back.
        ({"resident": True}, 0, 2 * 20 - 6),
        # Nothing hides a gather that starts after the counts; gradients in the parameters' data type.
        ({"each_micro_batch": True}, 2 * 10, 2 * (10 - 6)),
        # Both gathers and the reduction, with each of two micro-batches.
        ({"rematerialize": True}, 2 * (10 - 4) + 2 * 10, 2 * (10 - 6)),
    ],
)
def test_what_is_waited_for_by_life(ways, gather_s, reduce_s):
    """The device that owns the only expert sends it to the other one, at 8 bytes/s; there are no tokens."""
    link = LinkCost(0.0, 1 / 8)
    profile = replace(PROFILE, cluster=ClusterCost(link, link, 1.0), non_moe_s=3.0, num_micro_batches=2)
    profile = replace(profile, expert_bytes=80, gradient_bytes=160)
    placement, topology = ExpertPlacement(np.array([0]), np.ones((1, 2), dtype=bool)), Topology.uniform(2, 1)
    plan = LayerPlan(placement, two_level_transfer(placement, topology), **ways)
    layer = (np.zeros((2, 1), np.int64), LayerContext(1, placement.owner_E, topology, profile))
    price = plan_price(plan, *layer)
    assert float(price.gather_s) == pytest.approx(gather_s)
    assert float(price.reduce_s) == pytest.approx(reduce_s)
    assert price.before_s == 2 * 3 * 3.0
    frozen = replace(layer[1], profile=replace(profile, gradient_bytes=0, trained_share=0.0))
    assert plan_price(plan, layer[0], frozen).reduce_s == 0
    in_turn = plan_price(replace(plan, gather_ahead=False), *layer)
    assert in_turn.gather_s + in_turn.reduce_s > gather_s + reduce_s
