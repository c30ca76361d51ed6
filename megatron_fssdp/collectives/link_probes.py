"""Measures the cost of messages between devices, and of torch's collectives, inside and between nodes."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.device_clock import elapsed_s
from megatron_fssdp.collectives.messages import connect_pairs, exchange
from megatron_fssdp.planning.cost.cost_model import LEAST_BETA_S_PER_BYTE, LinkCost, LinkFit, fit_link_cost
from megatron_fssdp.planning.cost.link_seconds import LinkSet
from megatron_fssdp.planning.placement.topology import Topology

_WORD_BYTES = 4
_MESSAGE_BYTES = (1 << 16, 1 << 19, 1 << 22)
_LONGEST_S = 0.05
"""A fast link reaches its full speed only with whole experts, of hundreds of MiB. Where they take longer than
this, the smaller messages have reached it already."""
_REPETITIONS = 4
_MOST_ROUNDS = 8
"""Other processes on the same cores can delay small messages as much as large ones, and the fit then finds no
cost for bytes. The shortest times of all rounds count, so further rounds come closer to undisturbed ones."""


_Edges = Sequence[tuple[int, int]]
"""Messages that travel at the same time: ranks that send, and ranks that receive."""


def measure_links(
    group: dist.ProcessGroup, topology: Topology, device: torch.device, most_bytes: int = 0
) -> LinkSet:
    """Measure one direction of a device's link in its node, and of a node's NICs; equal on all ranks.

    All ranks of the group call it. Between nodes, one device of each node sends alone, and then every device
    sends to the one with its position in the next node, which shows what a node reaches; its bytes are those
    of all its devices. A class without a link gets the cost of the other one, and a group of one rank zero
    latency and the lowest beta. Messages of ``most_bytes`` are measured as well where they are fast enough.
    """
    if device.type == "cuda":
        connect_pairs(group, device)  # Only some ranks exchange messages, maybe the first ones of the group.
    # The largest nodes are neighbours, because a smaller one could not keep a larger one busy.
    nodes = sorted(topology.devices_by_node, key=len, reverse=True)
    inside = [edge for devices in nodes for edge in _ring(devices)]
    near = _measure(group, inside, device, most_bytes) if inside else None
    if len(nodes) == 1:
        near = near or LinkCost(0.0, LEAST_BETA_S_PER_BYTE)
        return LinkSet(near, near, near)
    alone = _measure(group, _ring([devices[0] for devices in nodes]), device, most_bytes)
    of_node, num_messages = alone, len(nodes[1])  # of the busiest two nodes
    if num_messages > 1:
        together = [edge for own, after in _ring(nodes) for edge in zip(own, after, strict=False)]
        of_node = _measure(group, together, device, most_bytes)
    of_byte = LinkCost(of_node.alpha_s, of_node.beta_s_per_byte / num_messages)
    return LinkSet(near or alone, of_byte, alone)


def _ring[Member](members: Sequence[Member]) -> list[tuple[Member, Member]]:
    """Each member with the next one, and the last with the first; nothing for a single one."""
    return [*zip(members, [*members[1:], members[0]], strict=True)] if len(members) > 1 else []


def _measure(group: dist.ProcessGroup, edges: _Edges, device: torch.device, most_bytes: int) -> LinkCost:
    fastest = [float("inf")] * len(_MESSAGE_BYTES)
    for _ in range(_MOST_ROUNDS):
        fastest = [*map(min, fastest, _fastest_exchanges_s(group, edges, device, _MESSAGE_BYTES))]
        seconds = _slowest(fastest, group, device)
        cost = fit_link_cost(_MESSAGE_BYTES, seconds)
        if cost.beta_s_per_byte > LEAST_BETA_S_PER_BYTE:
            break
    else:
        # A planner must not believe that bytes are free. The whole time of the largest message is a limit.
        return LinkCost(0.0, seconds[-1] / _MESSAGE_BYTES[-1])
    if most_bytes <= _MESSAGE_BYTES[-1] or cost.time_s(most_bytes) > _LONGEST_S:
        return cost
    seconds += _slowest(_fastest_exchanges_s(group, edges, device, [most_bytes]), group, device)
    return fit_link_cost((*_MESSAGE_BYTES, most_bytes), seconds)


def _fastest_exchanges_s(
    group: dist.ProcessGroup, edges: _Edges, device: torch.device, sizes: Sequence[int]
) -> list[float]:
    """Shortest measured seconds of an exchange of each size; zeros if this rank has no message."""
    if not any(group.rank() in edge for edge in edges):
        return [0.0] * len(sizes)
    # The first exchange includes the time to connect.
    return [min([_exchange_s(group, edges, size, device) for _ in range(_REPETITIONS)][1:]) for size in sizes]


def _slowest(seconds: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Highest seconds of all ranks, equal on all: the slowest link of a class determines its cost."""
    highest = torch.tensor(seconds, dtype=torch.float64).to(device)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return [*highest.tolist()]


def _exchange_s(group: dist.ProcessGroup, edges: _Edges, num_bytes: int, device: torch.device) -> float:
    """Seconds in which this rank sends and receives its messages of an exchange; all of its ranks call it."""
    rank = group.rank()
    outgoing = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    sends = [(target, outgoing) for source, target in edges if source == rank]
    receives = [(source, torch.empty_like(outgoing)) for source, target in edges if target == rank]
    return elapsed_s(lambda: exchange(sends, receives, group), device)


Prepare = Callable[[int, dist.ProcessGroup, torch.device], tuple[Callable[[], object], int]]
"""Prepares a call of about so many bytes; also the bytes that the busiest device sends in it."""


def measure_collective(
    name: str,
    group: dist.ProcessGroup | None,
    everyone: dist.ProcessGroup,
    device: torch.device,
    *,
    message_bytes: Sequence[int],
    num_repetitions: int,
    prepare: Prepare | None = None,
) -> LinkFit:
    """Measure the cost of one collective while all groups run it at the same time.

    All ranks of ``everyone`` call it. The result uses :func:`slowest_medians_s` and is equal
    on all of them.

    The name is a ``CollectiveName`` of cluster descriptions; all but ``all_to_all`` are known here, which
    ``prepare`` provides. The group of this rank has at least two ranks, and is ``None`` if the rank only
    waits. Sizes are bytes that the busiest device sends, so that the bandwidths are comparable.
    """
    prepare = prepare or partial(_prepare, name)
    calls: list[tuple[Callable[[], object], int]] = [
        prepare(num_bytes, group, device) if group is not None else (lambda: None, 0)
        for num_bytes in message_bytes
    ]
    seconds = slowest_medians_s([call for call, _ in calls], everyone, device, num_repetitions)
    sent = _slowest([sent_bytes for _, sent_bytes in calls], everyone, device)
    return LinkFit.of(sent, seconds)


def slowest_medians_s(
    calls: Sequence[Callable[[], object]],
    everyone: dist.ProcessGroup,
    device: torch.device,
    num_repetitions: int,
) -> list[float]:
    """Median seconds of each call on the slowest rank, after barriers of ``everyone``; equal on all ranks."""
    medians = []
    for call in calls:
        seconds = []
        for _ in range(1 + num_repetitions):
            dist.barrier(group=everyone)
            seconds.append(elapsed_s(call, device))
        medians.append(statistics.median(seconds[1:]))  # The first call includes the time to connect.
    return _slowest(medians, everyone, device)


def _prepare(
    name: str, num_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[Callable[[], object], int]:
    """The collective as a function, and the bytes that the busiest device sends in one call, in whole words.

    In all-gather and reduce-scatter, a device sends ``D - 1`` of ``D`` parts. In all-reduce, it sends twice
    as much (reduce-scatter and all-gather). In a broadcast, every device except the last passes the whole
    message on.
    """
    size = group.size()

    def words(number: float) -> torch.Tensor:
        return torch.zeros(max(1, round(number / _WORD_BYTES)), device=device)

    if name == "point_to_point":
        outgoing = words(num_bytes)
        incoming, rank = torch.empty_like(outgoing), group.rank()
        ahead, behind = [((rank + 1) % size, outgoing)], [((rank - 1) % size, incoming)]
        return lambda: exchange(ahead, behind, group), outgoing.nbytes
    if name == "broadcast":
        message = words(num_bytes)
        return lambda: dist.broadcast(message, group=group, group_src=0), message.nbytes
    if name == "all_reduce":
        message = words(num_bytes * size / (2 * (size - 1)))
        sent_bytes = round(message.nbytes * 2 * (size - 1) / size)
        return lambda: dist.all_reduce(message, group=group), sent_bytes
    part = words(num_bytes / (size - 1))
    whole = part.repeat(size)
    sent_bytes = part.nbytes * (size - 1)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group), sent_bytes
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group), sent_bytes
    raise ValueError(f"collective {name!r} is not known")
