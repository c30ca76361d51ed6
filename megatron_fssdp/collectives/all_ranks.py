"""Brings what each rank knows to all of them."""

from typing import Any

import torch.distributed as dist


def of_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of a group's ranks, by default of the whole training, on each of them. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
