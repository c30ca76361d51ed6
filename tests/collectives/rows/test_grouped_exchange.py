"""The order in which a grouped exchange issues messages and compute on a CUDA device."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron_fssdp.collectives.rows import grouped_exchange
from megatron_fssdp.planning.placement.group_ring import GroupRing

from ..finished_cuda import finished_cuda


class Group:
    """Stands for a process group of four ranks, seen from rank 1."""

    def rank(self) -> int:
        return 1


@pytest.mark.parametrize("own_last", [False, True])
def test_rows_of_a_step_are_sent_just_before_the_compute_of_the_step_before(
    monkeypatch: pytest.MonkeyPatch, own_last: bool
) -> None:
    log = finished_cuda(monkeypatch)
    order: list[str] = []
    recorded: list[Tensor] = []
    results = torch.zeros(4)

    def together(sent: Any, received: Sequence[tuple[int, int, Tensor]], group: Any) -> None:
        assert log.on_lane
        ours = results.untyped_storage().data_ptr()
        is_return = any(part.untyped_storage().data_ptr() == ours for *_, part in received)
        order.append("R" if is_return else "S")

    def compute(step: int, rows: Sequence[Tensor]) -> list[Tensor]:
        assert not log.on_lane
        order.append(f"C{step}")
        return [rows[0] * 2]

    monkeypatch.setattr(grouped_exchange, "_together", together)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor))
    ring = GroupRing(1, 4, 1, own_last)
    steps = grouped_exchange._Steps(
        [torch.ones(4).split([1] * 4)], [results.split([1] * 4)], [1] * 4, ring, cast(Any, Group())
    )
    grouped_exchange._run_on_stream(steps, compute)
    assert order == ["S", "S", "C0", "R", "S", "C1", "R", "S", "C2", "R", "C3", "R"]
    assert results[1] == 2, "the rank's own row"
    # Only the results of a step are given back before the current stream has waited for the messages.
    assert len(recorded) == 4
    assert len(log.made) == 1
