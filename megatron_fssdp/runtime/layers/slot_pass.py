"""One plan in use: which expert is in which slot, the remap of the routing, and the replicas' transfers.

Shape letters: T tokens, D devices, E experts, U slots of a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.slot_tables import SlotTable, dispatch_table, even_table, owner_table
from megatron_fssdp.runtime.experts.expert_layout import ExpertParameters
from megatron_fssdp.runtime.slots.exact_shares import Holders
from megatron_fssdp.runtime.slots.replica_transfers import ReplicaTransfers
from megatron_fssdp.strategies.layer_plan import LayerPlan


@dataclass(eq=False)
class SlotPass:
    """What the forward passes under one plan share, and their backward passes with them.

    Attributes:
        digest: Digest of the plan.
        slots: Expert in each slot.
        parameters_U: Parameters of each slot of this device; ``None`` for an empty slot.
        table_EJ: Share table of this device on the device (``remap.by_number``). ``None`` if slots are
            Megatron's own local experts, so that nothing has to be remapped, or if shares are exact.
        holders: What exact shares need to know of the plan (``exact_shares.py``); ``None`` without them.
        transfers: Transfers of the replicas; ``None`` if the plan has none, or resident ones.
        is_shared: Whether all passes of an iteration use it. Otherwise it belongs to one micro-batch.
        counts_DE: Counts of the micro-batch to which the pass belongs, int64 ``[D, E]``; ``None`` if shared.
        is_recomputed: Whether the forward pass runs in a backward pass.
        has_backward: Whether a backward pass follows the last forward pass.
        is_over: Whether the gradients of a micro-batch's pass are complete.
        has_gradients: Whether replicas have gradients that belong to their owners.
        holds_each_pass: Whether the weights are released after each pass and gathered again
            (re-materialization).
        num_slots: Number of slots of all devices, W.
    """

    plan: LayerPlan
    digest: bytes
    slots: SlotTable
    parameters_U: Sequence[ExpertParameters | None]
    table_EJ: torch.Tensor | None
    holders: Holders | None
    transfers: ReplicaTransfers | None
    is_shared: bool = True
    counts_DE: np.ndarray | None = None
    is_recomputed: bool = False
    has_backward: bool = False
    is_over: bool = False

    def __post_init__(self) -> None:
        # Attributes, because every forward pass asks for them.
        self.num_slots = self.slots.num_slots
        self.has_gradients = self.transfers is not None or self.plan.resident
        self.holds_each_pass = self.transfers is not None and self.plan.rematerialize


def source_table(
    plan: LayerPlan, slots: SlotTable, topology: Topology, device: int, counts_DE: np.ndarray | None
) -> np.ndarray:
    """The share table of one source device under a plan's dispatch, int64 ``[J, E]``.

    A dispatch that depends on counts is planned for ``counts_DE``, integers: forecasts, or those of a
    micro-batch. ``None`` without any: nearest holders first.
    """
    placement = plan.placement
    if plan.dispatch_policy == "owner":
        return owner_table(slots, placement, device)
    even_JE = even_table(slots, placement, topology, device)
    if counts_DE is None or not plan.needs_counts:
        return even_JE
    return dispatch_table(slots, plan.dispatch(counts_DE, topology), device, even_JE)
