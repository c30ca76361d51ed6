"""How a layer's transfers are split over the compute before them, by measured costs (Pro-Prophet, §V-B)."""

from megatron_fssdp.planning.cost.layer_seconds import transfer_seconds
from megatron_fssdp.planning.cost.transfer_split import WHOLE, TransferSplit, split_transfers
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan
from megatron_fssdp.strategies.strategy import LayerContext


def split_of(transfer: TransferPlan, num_pairs: float, context: LayerContext) -> TransferSplit:
    """The split of a plan's transfers; none until costs are measured.

    Args:
        transfer: SparseAllGather of the plan.
        num_pairs: (token, k) pairs of an iteration. The experts of the layer before are taken to have as
            many, evenly spread.
        context: The layer.
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
