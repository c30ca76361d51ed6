"""SparseAllGather, SparseReduceScatter, uneven all-to-all, slot exchange and the plan agreement check."""

from megatron_fssdp.collectives.plan_agreement import check_agreement
from megatron_fssdp.collectives.slot_exchange import SlotQuantity, exchange_slots
from megatron_fssdp.collectives.sparse_collectives import (
    SparseAllGather,
    SparseReduceScatter,
    sparse_all_gather,
    sparse_reduce_scatter,
)
from megatron_fssdp.collectives.sparse_transfer import SparseTransfer
from megatron_fssdp.collectives.transfer_lane import PendingTransfer
from megatron_fssdp.collectives.uneven_all_gather import (
    uneven_all_gather,
    uneven_reduce_scatter,
)
from megatron_fssdp.collectives.uneven_all_to_all import UnevenAllToAll, gather_counts, uneven_all_to_all

__all__ = [
    "PendingTransfer",
    "SlotQuantity",
    "SparseAllGather",
    "SparseReduceScatter",
    "SparseTransfer",
    "UnevenAllToAll",
    "check_agreement",
    "exchange_slots",
    "gather_counts",
    "sparse_all_gather",
    "sparse_reduce_scatter",
    "uneven_all_gather",
    "uneven_all_to_all",
    "uneven_reduce_scatter",
]
