"""Turns a cluster's description into the costs that planners and the simulator use."""

from collections.abc import Mapping

from megatron_fssdp.config.cluster_description import (
    ClusterDescription,
    CollectiveName,
    LinkClass,
    LinkDescription,
)
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.tensor_schedules import Group, Kind, ScheduleCosts


def cluster_cost(cluster: ClusterDescription) -> ClusterCost:
    """Costs of a cluster's links and its throughput on experts, as strategies get them."""
    return ClusterCost(
        intra=link_cost(cluster.intra_node),
        inter=link_cost(cluster.inter_node),
        expert_flops_per_s=cluster.expert_flops_per_s,
    )


def link_cost(link: LinkDescription, num_sharing: int = 1) -> LinkCost:
    """Cost of transfers over a link (Parm, §V, Eq. 12).

    Args:
        link: Description of the link.
        num_sharing: Number of devices that were measured to get the bandwidth, each one, at the same time.
            The bandwidth of the link is multiplied by it.
    """
    return LinkCost(link.alpha_s, 1 / (link.bandwidth_bytes_per_s * num_sharing))


def collective_link(
    cluster: ClusterDescription, collective: CollectiveName, link_class: LinkClass
) -> LinkDescription | None:
    """Measured costs of a collective in a node or between nodes; ``None`` if it was not measured."""
    return cluster.collectives.get(collective, {}).get(link_class)


def schedule_costs(cluster: ClusterDescription, ranks: Mapping[Group, tuple[int, int]]) -> ScheduleCosts:
    """Costs of the collectives of Parm's schedules on a cluster, as functions of Parm's sizes.

    A cluster's description does not say how much of an all-to-all is hidden when it runs beside a gather.
    This function assumes that nothing is hidden, which is Parm's upper bound (Eq. 7).

    Args:
        cluster: Description of the cluster, with measured collectives or with links alone.
        ranks: For each kind of group, its number of ranks, and how many other ranks of the group are in a
            rank's own node.
    """
    kinds: dict[Kind, tuple[CollectiveName, tuple[Group, ...]]] = {
        "all_to_all": ("row_exchange", ("ep", "ep_esp")),
        "overlapped_all_to_all": ("row_exchange", ("ep_esp",)),
        "all_gather": ("all_gather", ("esp", "mp")),
        "reduce_scatter": ("reduce_scatter", ("esp",)),
    }

    def cost_of(collective: CollectiveName, num_ranks: int, num_near: int) -> LinkCost:
        """Cost as a function of the whole tensor's bytes, of which a rank sends a part to each other rank."""
        num_far = num_ranks - 1 - num_near
        link = collective_link(cluster, collective, "inter_node" if num_far else "intra_node")
        sharers = 1
        if link is None:
            link = cluster.inter_node if num_far else cluster.intra_node
            sharers = cluster.devices_per_node if num_far else 1
        sent_share = (num_far or num_ranks - 1) / num_ranks
        return LinkCost(link.alpha_s, sent_share * sharers / link.bandwidth_bytes_per_s)

    return {
        (kind, group): cost_of(collective, *ranks[group])
        for kind, (collective, groups) in kinds.items()
        for group in groups
        if group in ranks and ranks[group][0] > 1
    }
