"""Splits a layer's transfers over the compute before the layer, by measured costs (Pro-Prophet, §V-B)."""

from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import transfer_times
from megatron_fssdp.planning.cost.layer_traffic import TransferTraffic, transfer_traffic
from megatron_fssdp.planning.cost.link_seconds import plain_links
from megatron_fssdp.planning.cost.transfer_split import WHOLE, TransferSplit, split_transfers
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan
from megatron_fssdp.strategies.layer_plan import LayerContext


def split_of(transfer: TransferPlan, num_pairs: float, context: LayerContext) -> TransferSplit:
    """The split of a plan's transfers; transfers stay whole until costs are measured.

    Args:
        transfer: Transfer plan of the layer's replicas.
        num_pairs: Number of (token, k) pairs in an iteration. The function assumes that the layer before has
            the same number, spread evenly over the devices.
        context: Data of the layer.
    """
    profile = context.profile
    if profile is None:
        return WHOLE
    traffic = transfer_traffic(transfer, context.topology)
    return split_of_traffic(traffic, num_pairs, profile, context.topology)


def split_of_traffic(
    traffic: TransferTraffic, num_pairs: float, profile: LayerProfile, topology: Topology
) -> TransferSplit:
    """The split of transfers with a given traffic.

    Args:
        traffic: Traffic of the transfers. Its fields may be arrays with one entry for each case.
        num_pairs: Number of (token, k) pairs in an iteration, as in :func:`split_of`.
        profile: Measured costs.
        topology: Nodes of the devices.
    """
    links = plain_links(profile.cluster).transfer
    gather_s, reduce_s = (
        transfer_times(links, traffic, num_bytes, profile.messages).seconds
        for num_bytes in (profile.expert_bytes, profile.reduced_bytes)
    )
    flops = num_pairs * profile.flops_per_token / (topology.num_devices * profile.num_micro_batches)
    return split_transfers(
        gather_s,
        reduce_s,
        non_expert_s=profile.non_moe_s,
        expert_s=flops / profile.cluster.expert_flops_per_s,
    )
