"""From a cluster's description to the costs that planners and the simulator count with."""

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


def schedule_costs(cluster: ClusterDescription, ranks: Mapping[Group, tuple[int, int]]) -> ScheduleCosts:
    """What the collectives of Parm's schedules cost on a cluster, by Parm's sizes.

    A cluster's description knows nothing of an all-to-all beside a gather: none of it is taken to be hidden,
    which is Parm's upper bound (Eq. 7).

    Args:
        cluster: With measured collectives, or links alone.
        ranks: Of each kind of group, how many there are and how many others are in a rank's own node.
    """
    kinds: dict[Kind, tuple[CollectiveName, tuple[Group, ...]]] = {
        "all_to_all": ("row_exchange", ("ep", "ep_esp")),
        "overlapped_all_to_all": ("row_exchange", ("ep_esp",)),
        "all_gather": ("all_gather", ("esp", "mp")),
        "reduce_scatter": ("reduce_scatter", ("esp",)),
    }
    return {
        (kind, group): _whole_tensor_cost(cluster, collective, *ranks[group])
        for kind, (collective, groups) in kinds.items()
        for group in groups
        if group in ranks and ranks[group][0] > 1
    }


def _whole_tensor_cost(
    cluster: ClusterDescription, collective: CollectiveName, num_ranks: int, num_near: int
) -> LinkCost:
    """By the length of the whole tensor, of which a rank sends a part to each of the others."""
    num_far = num_ranks - 1 - num_near
    link_class: LinkClass = "inter_node" if num_far else "intra_node"
    link = collective_link(cluster, collective, link_class)
    if link is None:
        plain = cluster.inter_node if num_far else cluster.intra_node
        sharers = cluster.devices_per_node if num_far else 1
        cost = LinkCost(plain.alpha_s, sharers / plain.bandwidth_bytes_per_s)
    else:
        cost = link_cost(link)
    counted = num_far or num_ranks - 1
    return LinkCost(cost.alpha_s, cost.beta_s_per_byte * counted / num_ranks)
