"""What a pass out of turn is told."""

from types import SimpleNamespace

import pytest
import torch

from megatron_fssdp.runtime.slots.replica_transfers import ReplicaTransfers


def test_gradients_of_a_pass_whose_sums_are_on_their_way_are_refused():
    """Added to memory that is being sent, they would be lost."""

    class Started:
        received_experts, shared_experts = (), ()
        wait = start_reduce_scatter = lambda *_, **__: started

    started = Started()
    plan = SimpleNamespace(rematerialize=True, transfer=None)
    nothing = dict.fromkeys(("open_sums", "close_sums", "add_gradients"), lambda: None)
    layout = SimpleNamespace(numel=2, trained_numel=2, num_trained=1, dtype=torch.float32)
    slots = SimpleNamespace(room=None, layout=layout, sums=dict, **nothing)
    experts = SimpleNamespace(name="layer 3", await_gradients=lambda: None, parameters={})
    transfers = ReplicaTransfers(plan, slots, experts, lambda *_: started)
    for _ in range(2):
        transfers.open_sums()
        transfers.add_gradients()
        transfers.reduce(torch.float32)
        with pytest.raises(RuntimeError, match=r"layer 3: .* sums are on their way"):
            transfers.add_gradients()
