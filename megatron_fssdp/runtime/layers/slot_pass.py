"""One plan in use: which expert is in which slot, the remap of the routing, and the replicas' transfers.

Shape letters: D devices, E experts, U slots of a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.dispatch.whole_tokens import KnownSplits
from megatron_fssdp.planning.slot_tables import SlotTable
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
    ends_at_dispatch: bool = False  # They leave, or are computed, after the backward pass of the dispatch.
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
