"""Finds out which ranks share a node: from a setting, from the launcher, or from host names."""

import os
import socket

import torch.distributed as dist

from megatron_fssdp.collectives.all_ranks import of_all_ranks
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.planning.placement.topology import Topology

# Each of verl's workers under Ray sets LOCAL_WORLD_SIZE to 1, LOCAL_RANK to 0, and this to the true number.
_RAY_SIZE = "RAY_LOCAL_WORLD_SIZE"


def ranks_of_node(unknown: int) -> int:
    """Return the number of ranks on this node, as the launcher says; ``unknown`` if it does not."""
    return int(os.environ.get(_RAY_SIZE) or os.environ.get("LOCAL_WORLD_SIZE") or unknown)


def detect_topology(group: dist.ProcessGroup, declared_nodes: int | None) -> Topology:
    """Return the nodes of a process group's ranks.

    ``declared_nodes`` equal nodes divide all ranks in rank order, so that four ranks on one machine can be
    treated as two nodes. Otherwise, the variables that torchrun sets on each node decide, and host names if
    they are not set. A collective over the group gathers them, because nodes may have different sizes.
    """
    ranks = dist.get_process_group_ranks(group)
    if declared_nodes is not None:
        check_declared_nodes(declared_nodes, dist.get_world_size())
        per_node = dist.get_world_size() // declared_nodes
        return Topology.from_labels([rank // per_node for rank in ranks])
    own, local_world_size = socket.gethostname(), int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if local_world_size and _RAY_SIZE not in os.environ:
        rank = dist.get_rank()
        # The ranks of a node are consecutive, so its first rank names it.
        own = f"node of rank {rank - int(os.environ.get('LOCAL_RANK', rank % local_world_size))}"
    return Topology.from_labels(of_all_ranks(own, group))


def check_declared_nodes(declared_nodes: int, world_size: int) -> None:
    """Raise a ConfigurationError unless all ranks can be divided into that many equal nodes."""
    if world_size % declared_nodes:
        raise ConfigurationError(
            f"nodes: got {declared_nodes}, wanted a divisor of the {world_size} ranks; "
            "leave the setting out to detect the nodes"
        )
