"""Under re-materialization, the memory of the weights goes with the last of all users; otherwise it stays.

That weights and gradients arrive is tested by the layers, with every life and split of the transfers.
"""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_fssdp.collectives.transfer_lanes import PendingTransfer, TransferTimer
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.runtime.experts.expert_layout import ExpertLayout, LocalExperts
from megatron_fssdp.runtime.slots.replica_slots import ReplicaSlots
from megatron_fssdp.runtime.slots.replica_transfers import ReplicaTransfers
from megatron_fssdp.strategies.layer_plan import LayerPlan
from tests.support.random_placement import plain_transfer

LAYOUT = ExpertLayout((torch.Size((3, 2)),), torch.float32)


@pytest.mark.parametrize("rematerialize", [False, True])
def test_memory_goes_with_the_last_user(rematerialize: bool) -> None:
    placement = ExpertPlacement(np.array([1]), np.ones((1, 2), bool))
    plan = LayerPlan(placement, plain_transfer(placement), rematerialize=rematerialize)
    slots = ReplicaSlots(LAYOUT, torch.device("cpu"))
    slots.hold([0])
    transfer = mock.Mock(shared_experts=(), received_experts=(0,))
    transfer.start_all_gather.side_effect = lambda *_, **__: PendingTransfer(TransferTimer(), {})
    experts = LocalExperts("layer 1", {}, told_layout=LAYOUT)
    transfers = ReplicaTransfers(plan, slots, experts, lambda *_: transfer)

    def use(step: Any, is_held: bool, **which: bool) -> None:
        step(**which)
        assert slots.held_bytes == (LAYOUT.num_bytes if is_held or not rematerialize else 0)
        assert transfers.is_gathered == (is_held or not rematerialize)

    for is_prefetched in (True, False):
        for is_backward in (False, True):
            if is_prefetched:
                use(transfers.prefetch, True, backward=is_backward)
                use(transfers.prefetch, True, backward=is_backward)
            use(transfers.begin_use, True, backward=is_backward)
            use(transfers.end_use, False)
    # A forward pass beside a prefetched backward pass, as in a combined 1F1B schedule.
    use(transfers.prefetch, True, backward=True)
    use(transfers.begin_use, True, backward=False)
    use(transfers.end_use, True)
    use(transfers.begin_use, True, backward=True)
    use(transfers.end_use, False)
    assert transfer.start_all_gather.call_count == (5 if rematerialize else 1)
    transfers.drop()
    assert slots.held_bytes == 0
