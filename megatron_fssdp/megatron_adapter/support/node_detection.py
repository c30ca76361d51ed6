"""Finds out which ranks share a node: from a setting, from the launcher, or from host names."""

import os
import socket

import torch.distributed as dist

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.planning.placement.topology import Topology


def detect_topology(group: dist.ProcessGroup, declared_nodes: int | None) -> Topology:
    """Return the nodes of a process group's ranks.

    Without a declared number of nodes, torchrun's ``LOCAL_WORLD_SIZE`` decides, and host names if it is not
    set. Host names are gathered by a collective over the group.

    Args:
        group: Expert-parallel group.
        declared_nodes: Number of equal nodes into which all ranks are divided, in rank order. Four ranks on
            one machine can be treated as two nodes. ``None`` detects the nodes.

    Raises:
        ConfigurationError: The number of ranks is not a multiple of ``declared_nodes``.
    """
    ranks = dist.get_process_group_ranks(group)
    if declared_nodes is not None:
        check_declared_nodes(declared_nodes, dist.get_world_size())
        per_node = dist.get_world_size() // declared_nodes
        return Topology.from_labels([rank // per_node for rank in ranks])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if local_world_size:
        return Topology.from_labels([rank // local_world_size for rank in ranks])
    hosts: list[str] = [""] * len(ranks)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return Topology.from_labels(hosts)


def check_declared_nodes(declared_nodes: int, world_size: int) -> None:
    """Raise unless all ranks can be divided into that many equal nodes.

    Args:
        declared_nodes: Number of nodes.
        world_size: Number of all ranks.

    Raises:
        ConfigurationError: The number of ranks is not a multiple of ``declared_nodes``.
    """
    if world_size % declared_nodes:
        raise ConfigurationError(
            f"nodes: got {declared_nodes}, wanted a divisor of the {world_size} ranks; "
            "leave the setting out to detect the nodes"
        )
