"""Seconds of the transfers of a plan, alone."""

from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import transfer_times
from megatron_fssdp.planning.cost.link_seconds import transfer_traffic
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import TransferPlan


def transfer_seconds(
    transfer: TransferPlan, expert_bytes: int, topology: Topology, profile: LayerProfile
) -> float:
    """Seconds of a plan's SparseAllGather, or of its transpose, with the link costs of a profile."""
    traffic = transfer_traffic(transfer, topology)
    return float(transfer_times(profile.links, traffic, expert_bytes, profile.messages).seconds)
