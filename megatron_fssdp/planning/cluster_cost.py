"""From a cluster's description to the costs that planners and the simulator count with."""

from megatron_fssdp.config.cluster_description import (
    ClusterDescription,
    CollectiveName,
    LinkClass,
    LinkDescription,
)
from megatron_fssdp.planning.cost_model import ClusterCost, LinkCost


def cluster_cost(cluster: ClusterDescription) -> ClusterCost:
    """What a strategy is told of a cluster: its links and its experts' throughput."""
    return ClusterCost(
        intra=link_cost(cluster.intra_node),
        inter=link_cost(cluster.inter_node),
        expert_flops_per_s=cluster.expert_flops_per_s,
    )


def link_cost(link: LinkDescription, num_sharing: int = 1) -> LinkCost:
    """Seconds of a transfer over a link (Parm, §V, Eq. 12).

    Args:
        link: The link.
        num_sharing: Devices of which each was measured to get the bandwidth at the same time.
    """
    return LinkCost(link.alpha_s, 1 / (link.bandwidth_bytes_per_s * num_sharing))


def collective_link(
    cluster: ClusterDescription, collective: CollectiveName, link_class: LinkClass
) -> LinkDescription | None:
    """How a collective was measured to use a class of links; ``None`` if it was not."""
    return cluster.collectives.get(collective, {}).get(link_class)
