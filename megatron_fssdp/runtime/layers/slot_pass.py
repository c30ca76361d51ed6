"""One plan in use: which expert is in which slot, the remap of the routing, and the replicas' transfers.

Shape letters: T tokens, D devices, E experts, U slots of a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.dispatch.whole_tokens import KnownSplits
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.slot_tables import SlotTable, dispatch_table, even_table, owner_table
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters
from megatron_fssdp.runtime.slots.remap.shares import Shares
from megatron_fssdp.runtime.slots.replica_transfers import ReplicaTransfers
from megatron_fssdp.strategies.layer_plan import LayerPlan


@dataclass(eq=False)
class SlotPass:
    """What the forward passes under one plan share, and their backward passes with them."""

    plan: LayerPlan
    digest: bytes  # of the plan
    slots: SlotTable  # which expert is in which slot
    parameters_U: Sequence[ExpertParameters | None]  # of each slot of this device; None for an empty slot
    replicas_U: Sequence[int]  # slots of this device without owned experts
    # None if slots are Megatron's own local experts, so that nothing has to be remapped.
    shares: Shares | None
    transfers: ReplicaTransfers | None  # None without replicas, or with resident ones
    is_late: bool = False  # Gradients of owned experts can be incomplete after their backward pass.
    is_shared: bool = True  # All passes of an iteration use it. Otherwise it belongs to one micro-batch.
    counts_DE: np.ndarray | None = None  # of this micro-batch, int64
    splits: KnownSplits | None = None  # of this micro-batch
    is_recomputed: bool = False  # The forward pass runs in a backward pass.
    has_backward: bool = False  # A backward pass follows the last forward pass.
    is_over: bool = False  # The gradients of a micro-batch's pass are complete.
    is_dropped: bool = False  # The loop has set gradients to zero since.

    def __post_init__(self) -> None:
        # Attributes, because every forward pass asks for them.
        self.num_slots = self.slots.num_slots
        # Whether replicas have gradients that belong to their owners.
        self.has_gradients = self.transfers is not None or self.plan.resident


def source_table(
    plan: LayerPlan, slots: SlotTable, topology: Topology, device: int, counts_DE: np.ndarray | None
) -> np.ndarray:
    """The share table of one source device under a plan's dispatch, int64 ``[J, E]``.

    A dispatch that depends on counts is planned for ``counts_DE``, integers; without any, it is even.
    """
    placement = plan.placement
    if plan.dispatch_policy == "owner":
        return owner_table(slots, placement, device)
    even_JE = even_table(slots, placement, topology, device)
    if counts_DE is None or not plan.needs_counts:
        return even_JE
    return dispatch_table(slots, plan.dispatch(counts_DE, topology), device, even_JE)
