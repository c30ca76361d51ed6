import torch
import torch.distributed as dist

from megatron_fssdp.megatron_adapter.experts.slot_quantities import PartedQuantity
from megatron_fssdp.testing import run_ranks
from megatron_fssdp.testing.parallel_state import MEGATRON_PRELOAD

SPECIAL = torch.tensor([-0.0, 0.0, float("nan"), float("inf"), -1e-45, 3.4e38, -0.0, 1.0, -2.5, -0.0])


def read_and_write(rank, world_size):
    """Two Parameters of 6 and 4 elements, cut differently in each slot; rank 2 holds nothing of slot 1."""
    slots = torch.stack([SPECIAL, SPECIAL.flip(0)])
    cuts = [[[(0, 4)], [(4, 6), (6, 7)], [(7, 10)]], [[(0, 6), (6, 9)], [(9, 10)], []]]
    parts = [
        [(first, slots[slot, first:last].clone()) for first, last in cuts[slot][rank]] for slot in range(2)
    ]
    quantity = PartedQuantity(
        "state exp_avg", 10, torch.float32, torch.device("cpu"), parts, dist.group.WORLD
    )
    for length in (1, 3, 10):
        for start in range(0, 10, length):
            rows = torch.full((2, min(length, 10 - start)), 7.0)
            quantity.read([1, 0], start, rows)
            wanted = slots[[1, 0], start : start + length]
            assert torch.equal(rows.view(torch.int32), wanted.contiguous().view(torch.int32))
            quantity.write([0, 1], start, rows)
            quantity.read([0, 1], start, rows)  # the slots have changed places
            assert torch.equal(rows.view(torch.int32), wanted.contiguous().view(torch.int32))
            quantity.write([1, 0], start, rows)
    quantity.read([], 0, torch.empty(0, 3))
    return True


def test_parts_on_several_ranks_are_assembled_bitwise():
    assert run_ranks(read_and_write, 3, preload=MEGATRON_PRELOAD) == [True] * 3
