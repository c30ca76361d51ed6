"""Measures what torch's collectives cost on one class of links, over message sizes.

The bytes of a message are those that the busiest device sends, so that all collectives' bandwidths
mean the same.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.probes.device_timing import elapsed_s
from megatron_fssdp.collectives.probes.link_probe import pass_on
from megatron_fssdp.collectives.rows.uneven_all_to_all import exchange_rows
from megatron_fssdp.planning.cost.cost_model import LinkFit

COLLECTIVES: Final = (
    "point_to_point",
    "row_exchange",
    "all_to_all",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
)

_WORD_BYTES = 4


def measure_collective(
    name: str,
    group: dist.ProcessGroup | None,
    everyone: dist.ProcessGroup,
    device: torch.device,
    *,
    message_bytes: Sequence[int],
    num_repetitions: int,
    num_near: int = 0,
) -> LinkFit:
    """Cost of one collective; called by all ranks of ``everyone``, whose groups are busy at the same time.

    A time is the median of the repetitions after one that may connect, and the longest of all ranks.

    Args:
        name: One of :data:`COLLECTIVES`.
        group: This rank's group, of two ranks or more; ``None`` to keep still while others exchange.
        everyone: All ranks that measure.
        device: Where the messages lie.
        message_bytes: Bytes that the busiest device sends.
        num_repetitions: Measured ones for each size.
        num_near: Of an exchange of all with all, how many others of a device's group are in its
            node; what it sends to them is not counted.

    Returns:
        Alpha and beta by those bytes, the same on all ranks.
    """
    calls: list[tuple[Callable[[], object], int]] = [
        _prepare(name, num_bytes, group, device, num_near) if group is not None else (lambda: None, 0)
        for num_bytes in message_bytes
    ]
    measured = [
        (sent_bytes, _median_s(call, everyone, device, num_repetitions) * (group is not None))
        for call, sent_bytes in calls
    ]
    most = torch.tensor(measured, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=everyone)
    sent, seconds = most.T.tolist()
    return LinkFit.of(sent, seconds)


def _median_s(
    call: Callable[[], object], everyone: dist.ProcessGroup, device: torch.device, num_repetitions: int
) -> float:
    seconds = []
    for _ in range(1 + num_repetitions):
        dist.barrier(group=everyone)
        seconds.append(elapsed_s(call, device))
    return statistics.median(seconds[1:])


def _prepare(
    name: str, num_bytes: int, group: dist.ProcessGroup, device: torch.device, num_near: int = 0
) -> tuple[Callable[[], object], int]:
    """What to call, and the bytes that the busiest device then sends: ``num_bytes`` in whole words.

    Gathering, scattering and exchanging, a device sends ``D - 1`` parts of ``D``; all-reduce, twice
    that (reduce-scatter and all-gather). A broadcast's message passes through each device but the last.
    """
    size = group.size()

    def words(number: float) -> torch.Tensor:
        return torch.zeros(max(1, round(number / _WORD_BYTES)), device=device)

    if name == "point_to_point":
        outgoing = words(num_bytes)
        incoming = torch.empty_like(outgoing)
        return lambda: pass_on(group, range(size), outgoing, incoming), outgoing.nbytes
    if name == "broadcast":
        message = words(num_bytes)
        return lambda: dist.broadcast(message, group=group, group_src=0), message.nbytes
    if name == "all_reduce":
        message = words(num_bytes * size / (2 * (size - 1)))
        sent_bytes = round(message.nbytes * 2 * (size - 1) / size)
        return lambda: dist.all_reduce(message, group=group), sent_bytes
    num_counted = size - 1 - num_near
    part = words(num_bytes / num_counted)
    whole = part.repeat(size)
    sent_bytes = part.nbytes * num_counted
    if name == "row_exchange":
        splits = [part.numel()] * size
        return lambda: exchange_rows((whole,), splits, splits, group), sent_bytes
    if name == "all_to_all":
        received = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(received, whole, group=group), sent_bytes
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group), sent_bytes
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group), sent_bytes
    raise ValueError(f"collective {name!r}: wanted one of {', '.join(COLLECTIVES)}")
