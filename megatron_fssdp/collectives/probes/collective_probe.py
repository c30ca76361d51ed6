"""Measures the cost of torch's collectives on one class of links for several message sizes.

The size of a message is the number of bytes that the busiest device sends. With this definition, the
bandwidths of all collectives are comparable.
"""

import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.device_clock import elapsed_s
from megatron_fssdp.collectives.probes.link_probe import pass_on
from megatron_fssdp.planning.cost.cost_model import LinkFit

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
    """Measure the cost of one collective while all groups run it at the same time.

    All ranks of ``everyone`` call it. The result, alpha (seconds) and beta (seconds per byte), uses the
    longest :func:`median_s` of all ranks and is equal on all of them.

    Args:
        name: ``point_to_point``, ``row_exchange``, ``all_to_all``, ``all_gather``, ``reduce_scatter``,
            ``all_reduce`` or ``broadcast``.
        group: Process group of this rank, with at least two ranks. ``None`` if this rank only waits.
        everyone: Process group of all ranks that measure.
        device: Device of the messages' tensors.
        message_bytes: Message sizes to measure: bytes that the busiest device sends.
        num_repetitions: Number of measured calls for each size.
        num_near: Number of other ranks of the group in a device's own node, for collectives in which all
            ranks exchange with all. Bytes that the device sends to these ranks are not counted.
    """
    calls: list[tuple[Callable[[], object], int]] = [
        _prepare(name, num_bytes, group, device, num_near) if group is not None else (lambda: None, 0)
        for num_bytes in message_bytes
    ]
    measured = [
        (sent_bytes, median_s(call, everyone, device, num_repetitions) * (group is not None))
        for call, sent_bytes in calls
    ]
    most = torch.tensor(measured, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=everyone)
    sent, seconds = most.T.tolist()
    return LinkFit.of(sent, seconds)


def median_s(
    call: Callable[[], object], everyone: dist.ProcessGroup, device: torch.device, num_repetitions: int
) -> float:
    """Median seconds of a call; before each, all ranks of ``everyone`` meet at a barrier.

    A first call, which includes the time to connect, does not count.
    """
    seconds = []
    for _ in range(1 + num_repetitions):
        dist.barrier(group=everyone)
        seconds.append(elapsed_s(call, device))
    return statistics.median(seconds[1:])


def _prepare(
    name: str, num_bytes: int, group: dist.ProcessGroup, device: torch.device, num_near: int
) -> tuple[Callable[[], object], int]:
    """The collective as a function, and the bytes that the busiest device sends in one call, in whole words.

    In all-gather, reduce-scatter and all-to-all, a device sends ``D - 1`` of ``D`` parts. In all-reduce, it
    sends twice as much (reduce-scatter and all-gather). In a broadcast, every device except the last passes
    the whole message on.
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
    if name in ("row_exchange", "all_to_all"):
        splits = [part.numel()] * size if name == "row_exchange" else None
        received = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(received, whole, splits, splits, group=group), sent_bytes
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group), sent_bytes
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group), sent_bytes
    raise ValueError(f"collective {name!r} is not known")
