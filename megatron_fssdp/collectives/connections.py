"""Connects all pairs of ranks of an NCCL group before the first message between them is needed.

NCCL opens the connection of two ranks when the first message between them is sent. In a training, this moment
comes when a plan first moves an expert between them, perhaps after many iterations. Both ranks then wait.
"""

import time
from weakref import WeakSet

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.messages import exchange_in_batch

_connected_groups: WeakSet[dist.ProcessGroup] = WeakSet()


def connect_pairs(group: dist.ProcessGroup, device: torch.device) -> float:
    """Send one element between every two ranks of a group; a second call for a group does nothing.

    Every rank of the group must make the first call. It also creates the group's communicator, for which NCCL
    needs all ranks. The host waits until all connections are open.

    Args:
        group: Process group whose ranks will exchange messages.
        device: This rank's CUDA device.

    Returns:
        Seconds that it took.
    """
    if group in _connected_groups:
        return 0.0
    _connected_groups.add(group)
    begin_s = time.perf_counter()
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    # Every rank begins with its next neighbour, so that no rank gets all first messages.
    others = [(rank + turn) % num_ranks for turn in range(1, num_ranks)]
    sent, received = torch.zeros(1, device=device), torch.empty(num_ranks, device=device)
    exchange_in_batch(
        [(peer, sent) for peer in others], [(peer, received[peer : peer + 1]) for peer in others], group
    )
    torch.cuda.current_stream(device).synchronize()
    return time.perf_counter() - begin_s
