"""How far the experts of a token are apart: histograms of different nodes and devices, for a run's records.

Shape letters: T tokens of this rank, E experts, D devices, N nodes.
"""

import numpy as np
import torch
from torch import Tensor

from megatron_fssdp.planning.placement.topology import Topology


def token_spread(routing_map: Tensor, owner_E: np.ndarray, topology: Topology) -> Tensor:
    """Numbers of tokens by the different nodes, and by the different devices, that own their experts.

    The host does not wait for the device. Tokens without an expert are not counted.

    Args:
        routing_map: Experts that each token of this rank selected, bool ``[T, E]``.
        owner_E: Owner of each expert, int64 ``[E]``.
        topology: Nodes of the devices.

    Returns:
        int64 ``[N + D]``: tokens with experts on 1, 2, … N nodes, then tokens with experts on 1, 2, … D
        devices.
    """
    device = routing_map.device
    selected = routing_map.float()
    histograms = []
    for place_E, num_places in (
        (topology.node_of_device_D[owner_E], topology.num_nodes),
        (owner_E, topology.num_devices),
    ):
        is_there = torch.from_numpy(place_E[:, None] == np.arange(num_places)).to(device, non_blocking=True)
        num_hit = (selected @ is_there.float() > 0).sum(dim=1)
        histogram = torch.zeros(num_places + 1, dtype=torch.int64, device=device)
        histograms.append(histogram.scatter_add_(0, num_hit, torch.ones_like(num_hit))[1:])
    return torch.cat(histograms)
