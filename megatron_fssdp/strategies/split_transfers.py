"""Splits a layer's transfers over the compute before the layer, by measured costs (Pro-Prophet, §V-B)."""

from megatron_fssdp.planning.cost.layer_seconds import transfer_seconds
from megatron_fssdp.planning.cost.transfer_split import WHOLE, TransferSplit, split_transfers
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan
from megatron_fssdp.strategies.strategy import LayerContext


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
    topology, cluster = context.topology, profile.cluster
    flops = num_pairs * profile.flops_per_token / (topology.num_devices * profile.num_micro_batches)
    return split_transfers(
        transfer_seconds(transfer, profile.expert_bytes, topology, profile),
        transfer_seconds(transfer, profile.reduced_bytes, topology, profile),
        non_expert_s=profile.non_moe_s,
        expert_s=flops / cluster.expert_flops_per_s,
    )
