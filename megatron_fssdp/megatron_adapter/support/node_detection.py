"""Which ranks share a node: declared, from the launcher, or from host names."""

import os
import socket

import torch.distributed as dist

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.planning.placement.topology import Topology


def detect_topology(group: dist.ProcessGroup, declared_nodes: int | None) -> Topology:
    """Nodes of a process group's ranks.

    Args:
        group: The expert-parallel group.
        declared_nodes: Number of equal nodes that the world's ranks form in rank order
            (4 ranks on one machine can play 2 nodes); ``None`` to detect them.

    Raises:
        ConfigurationError: The declared number does not divide the world.
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
    """Raise unless the world's ranks can form that many equal nodes.

    Raises:
        ConfigurationError: They cannot.
    """
    if world_size % declared_nodes:
        raise ConfigurationError(
            f"nodes: got {declared_nodes}, wanted a divisor of the {world_size} ranks; "
            "leave it out to detect the nodes"
        )
