"""Sums of the deduplicated exchange, and what it refuses; layers with it are compared with Megatron's own."""

import pytest
import torch

from megatron_fssdp.dispatchers.deduplicated import DeduplicatedTokenDispatcher, _Copies
from megatron_fssdp.planning.placement.topology import Topology
from tests.support.training_preload import on_ranks

from ..megatron_adapter.layer.small_config import moe_config


def test_rows_of_bf16_are_summed_in_fp32():
    copies = _Copies(torch.zeros(257, dtype=torch.int64), 2)
    rows = torch.ones(257, 1, dtype=torch.bfloat16)
    rows[0] = 256.0
    assert copies.sum(rows).tolist() == [[512.0], [0.0]]
    token = torch.ones(2, 1, dtype=torch.bfloat16, requires_grad=True)
    copies.spread(token).backward(rows)
    assert token.grad is not None
    assert token.grad.tolist() == [[512.0], [0.0]]


@on_ranks(2, ep=2)
def test_more_choices_than_rows_have_room_for_are_refused():
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    rank = torch.distributed.get_rank()
    dispatcher = DeduplicatedTokenDispatcher(
        2,
        [2 * rank, 2 * rank + 1],
        moe_config(2, 8, 4),
        get_default_pg_collection(),
        topology=Topology((0, 1)),
    )
    with pytest.raises(RuntimeError, match="more slots than their rows have room for: wanted at most 2"):
        dispatcher.dispatch_preprocess(
            torch.ones(3, 1, 8), torch.ones(3, 4, dtype=torch.bool), torch.ones(3, 4)
        )
