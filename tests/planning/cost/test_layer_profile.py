import pytest

from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_profile import LayerProfile, measured_messages
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import HOST_MESSAGES, PipelinedMessages


def profile(intra_beta, inter_beta, non_moe_s=0.5):
    cluster = ClusterCost(LinkCost(1e-3, intra_beta), LinkCost(1e-3, inter_beta), expert_flops_per_s=1e9)
    return LayerProfile(
        non_moe_s, cluster, expert_bytes=1000, token_bytes=20, flops_per_token=300.0, memory_capacity=2
    )


@pytest.mark.parametrize(
    ("intra_beta", "inter_beta", "num_nodes", "wanted"),
    [
        (2.0**-16, 2.0**-14, 1, 32),  # 32.8 experts travel in 0.5 s at 64 KiB/s
        (2.0**-16, 2.0**-14, 2, 8),  # links between nodes have a quarter of the rate
        (2.0**-14, 2.0**-16, 2, 8),  # a faster network does not make the links inside faster
        (2.0**-14, 2.0**-16, 1, 8),
        (0.0, 0.0, 2, 0),  # nothing measured
    ],
)
def test_the_slowest_link_in_use_sets_the_bandwidth(intra_beta, inter_beta, num_nodes, wanted):
    topology = Topology.uniform(4, num_nodes)
    assert profile(intra_beta, inter_beta).overlap_degree(topology) == wanted


def test_messages_follow_the_slowest_link_of_a_plan_and_the_host():
    near, far = LinkCost(1e-6, 1 / 200e9), LinkCost(90e-6, 1 / 50e9)
    rule = measured_messages(ClusterCost(near, far, 1.0), on_cuda=True)
    assert isinstance(rule, PipelinedMessages)
    # The host starts a batch in 30 µs at best, and the link between nodes in 90 µs.
    assert (rule.near_bytes, rule.far_bytes) == pytest.approx((30e-6 * 200e9, 90e-6 * 50e9))
    slow_near = measured_messages(ClusterCost(far, near, 1.0), on_cuda=True)
    assert isinstance(slow_near, PipelinedMessages)
    assert slow_near.near_bytes == slow_near.far_bytes == rule.far_bytes
    assert measured_messages(ClusterCost(near, far, 1.0), on_cuda=False) is HOST_MESSAGES
