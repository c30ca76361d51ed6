"""When the smart schedule waits for weights; layers with it are compared with Megatron's own."""

from typing import Any

import torch

from megatron_fssdp.dispatchers.smart_schedule import _Pass
from megatron_fssdp.planning.placement.topology import GroupRing


def test_weights_are_awaited_where_rows_need_them() -> None:
    """Four groups of one rank; slot 1 of two can still be in transfer."""
    counts_DP = torch.tensor([[0, 5], [3, 0], [2, 1], [4, 0]])  # from ranks 0 to 3

    def steps_that_wait(in_transfer: list[int] | None, own_last: bool) -> list[int]:
        nothing: Any = None
        ring = GroupRing(0, 4, 1, own_last)
        one_pass = _Pass(ring, counts_DP, [], nothing, nothing, in_transfer, nothing)
        return [step for step in range(4) if one_pass.needs_weights(step)]

    assert steps_that_wait([1], own_last=False) == [0, 2, 3]
    # A rank's own rows come last, so rank 1's rows are computed before any wait.
    assert steps_that_wait([1], own_last=True) == [1, 3]
    assert steps_that_wait([], own_last=True) == [3]
    assert steps_that_wait(None, own_last=True) == [0, 1, 2, 3]
