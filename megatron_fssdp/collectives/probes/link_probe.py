"""Measures the cost of a message between devices of a group, inside a node and between nodes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.device_clock import elapsed_s
from megatron_fssdp.collectives.messages import exchange
from megatron_fssdp.planning.cost.cost_model import LEAST_BETA_S_PER_BYTE, LinkCost, fit_link_cost
from megatron_fssdp.planning.placement.topology import Topology

_MESSAGE_BYTES = (1 << 16, 1 << 19, 1 << 22)
_REPETITIONS = 4
_MOST_ROUNDS = 8
"""Limit of the repetitions of a round in which the fit finds no cost for bytes.

Other processes on the same cores can delay the small messages of a round as much as the large ones. The
shortest times of all rounds count, so each further round can only come closer to an undisturbed one.
"""


def measure_links(
    group: dist.ProcessGroup, topology: Topology, device: torch.device
) -> tuple[LinkCost, LinkCost]:
    """Measure the cost of one direction of a link inside a node, and of a node's NIC.

    All ranks of the group call it. During a measurement, all links of a class are busy at the same time, in a
    ring, as they are in a dispatch. If the group has no link of one class, that class gets the cost of the
    other one. A group of one rank gets zero latency and the lowest beta. If a disturbed machine shows no
    difference between small and large messages, it is measured again. After the last attempt, all the time of
    the largest message counts as the cost of its bytes.

    Returns:
        Cost of an intra-node link and of an inter-node link, equal on all ranks.
    """
    rings = (
        [list(devices) for devices in topology.devices_by_node if len(devices) > 1],
        [[devices[0] for devices in topology.devices_by_node]] if topology.num_nodes > 1 else [],
    )
    measured = [_measure(group, ring, device) if ring else None for ring in rings]
    intra = measured[0] or measured[1] or LinkCost(0.0, LEAST_BETA_S_PER_BYTE)
    return intra, measured[1] or intra


def _measure(group: dist.ProcessGroup, rings: Sequence[Sequence[int]], device: torch.device) -> LinkCost:
    rank = group.rank()
    ring = next((ring for ring in rings if rank in ring), None)
    unmeasured_s = float("inf") if ring is not None else 0.0
    fastest = torch.full((len(_MESSAGE_BYTES),), unmeasured_s, dtype=torch.float64)
    for _ in range(_MOST_ROUNDS):
        if ring is not None:
            fastest = torch.minimum(fastest, _fastest_exchanges_s(group, ring, device))
        # The slowest link of a class determines the cost of the class.
        slowest_link = fastest.to(device, copy=True)
        dist.all_reduce(slowest_link, op=dist.ReduceOp.MAX, group=group)
        cost = fit_link_cost(_MESSAGE_BYTES, slowest_link.tolist())
        if cost.beta_s_per_byte > LEAST_BETA_S_PER_BYTE:
            return cost
    # A planner must not believe that bytes are free. All the time of the largest message is an upper limit.
    return LinkCost(0.0, slowest_link[-1].item() / _MESSAGE_BYTES[-1])


def _fastest_exchanges_s(group: dist.ProcessGroup, ring: Sequence[int], device: torch.device) -> torch.Tensor:
    """Shortest measured seconds of an exchange of each size, float64."""
    seconds = [
        # The first exchange includes the time to connect.
        min([_exchange_s(group, ring, num_bytes, device) for _ in range(_REPETITIONS)][1:])
        for num_bytes in _MESSAGE_BYTES
    ]
    return torch.tensor(seconds, dtype=torch.float64)


def _exchange_s(group: dist.ProcessGroup, ring: Sequence[int], num_bytes: int, device: torch.device) -> float:
    outgoing = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    incoming = torch.empty_like(outgoing)
    return elapsed_s(lambda: pass_on(group, ring, outgoing, incoming), device)


def pass_on(
    group: dist.ProcessGroup, ring: Sequence[int], outgoing: torch.Tensor, incoming: torch.Tensor
) -> None:
    """Send a tensor to the next rank of a ring, and fill one from the rank before; all of them call it."""
    position = ring.index(group.rank())
    ahead, behind = ring[(position + 1) % len(ring)], ring[position - 1]
    exchange([(ahead, outgoing)], [(behind, incoming)], group)
