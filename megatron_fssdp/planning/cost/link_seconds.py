"""Seconds that a cluster's links take for the busiest of them; arrays in, arrays out.

Single numbers count as arrays without dimensions: the planners price one placement at a time.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from megatron_fssdp.config.cluster_description import ClusterDescription, CollectiveName
from megatron_fssdp.planning.cost.cluster_cost import collective_link, link_cost
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.cost.layer_traffic import BusiestLinks
from megatron_fssdp.planning.placement.topology import Topology

COUNT_BYTES = 8
"""One entry of the router counts that all devices gather."""

FREE = LinkCost(0.0, 0.0)


@dataclass(frozen=True, eq=False)
class LinkTimes:
    """Seconds on the links inside nodes and between them, beside each other.

    Attributes:
        near_s: On the busiest device's link.
        far_s: On the busiest NIC.
    """

    near_s: np.ndarray
    far_s: np.ndarray

    @cached_property
    def seconds(self) -> np.ndarray:
        """Until both are done."""
        return np.maximum(self.near_s, self.far_s)

    @property
    def is_far(self) -> np.ndarray:
        """Whether the NICs are what takes longest."""
        return np.asarray(self.far_s >= self.near_s)


@dataclass(frozen=True)
class LinkSet:
    """Costs by kind of link of one collective.

    Attributes:
        near: A device's link inside its node.
        far_of_node: A node's NICs together, shared by its devices.
        far_of_device: What one device alone gets of them; costs nothing where that is not known.
        far_of_all: What a node gets while all nodes send and receive as much; not known: nothing.
    """

    near: LinkCost
    far_of_node: LinkCost
    far_of_device: LinkCost = FREE
    far_of_all: LinkCost = FREE

    def times(
        self,
        busiest: BusiestLinks,
        bytes_per_unit: float | np.ndarray,
        starts: int = 1,
        first_s: float | np.ndarray = 0.0,
    ) -> LinkTimes:
        """Start-up and bytes of the busiest links (FasterMoE, Eq. 2; Parm, Eq. 12).

        Between nodes the largest of three bounds counts: the busiest NIC's bytes, the busiest device's, and
        an average NIC's at the bandwidth that is left while all of them are busy.

        Args:
            busiest: Units; its fields may be arrays.
            bytes_per_unit: Bytes of each.
            starts: Collectives among which the bytes are divided.
            first_s: Seconds before the first bytes arrive at the busiest links, where these have any.
        """
        near: Any = busiest.near * bytes_per_unit
        of_node: Any = busiest.far_of_node * bytes_per_unit
        far_s = of_node * self.far_of_node.beta_s_per_byte
        for units, link in (
            (busiest.far_of_device, self.far_of_device),
            (busiest.far_of_mean_node, self.far_of_all),
        ):
            if link.beta_s_per_byte:
                far_s = np.maximum(far_s, units * bytes_per_unit * link.beta_s_per_byte)
        near_start_s = starts * self.near.alpha_s + first_s
        far_start_s = starts * self.far_of_node.alpha_s + first_s
        return LinkTimes(
            (near > 0) * (near_start_s + near * self.near.beta_s_per_byte),
            (of_node > 0) * (far_start_s + far_s),
        )


@dataclass(frozen=True)
class ClusterLinks:
    """Links of a cluster as each kind of transfer uses them.

    Attributes:
        all_to_all: Dispatch and combine.
        transfer: spAG, spRS and re-sharding, which go device to device.
        counts: Router counts, to every device from every device.
    """

    all_to_all: LinkSet
    transfer: LinkSet
    counts: LinkSet

    def gather_counts_s(self, topology: Topology, num_experts: int) -> float:
        """Seconds in which every device gets the counts of all others."""
        if topology.num_devices == 1:
            return 0.0
        largest = max(len(devices) for devices in topology.devices_by_node)
        others = topology.num_devices - min(len(devices) for devices in topology.devices_by_node)
        busiest = BusiestLinks(float(largest - 1), float(others), float(others), float(others))
        return float(self.counts.times(busiest, COUNT_BYTES * num_experts).seconds)


@lru_cache
def plain_links(cluster: ClusterCost) -> ClusterLinks:
    """The links of a measured or described cluster, the same for every kind of transfer.

    Args:
        cluster: Link costs, as a run's profile has them.
    """
    links = LinkSet(cluster.intra, cluster.inter)
    return ClusterLinks(links, links, links)


def cluster_links(
    cluster: ClusterDescription, *, is_megatrons: bool = False, on_cuda: bool = True
) -> ClusterLinks:
    """The links of a description, with what was measured of single collectives in their place.

    Megatron's dispatcher calls torch's collectives. So does this package on CUDA devices; between
    CPUs it exchanges messages, rows and counts alike.

    A fitted all-to-all or all-gather gives what each device gets while all nodes' devices use
    their NICs, so a node gets that many times as much. An uneven all-to-all leaves most NICs idle: its
    busiest one has the description's ``inter_node`` to itself. A fitted point-to-point transfer bounds one
    device; the node's bound is ``inter_node`` as well.

    Args:
        cluster: The description.
        is_megatrons: Whether Megatron's own dispatcher moves the tokens.
        on_cuda: Whether they lie on CUDA devices.
    """
    near, far = link_cost(cluster.intra_node), link_cost(cluster.inter_node)

    all_to_all: CollectiveName = "all_to_all"
    if not is_megatrons and "row_exchange" in cluster.collectives:
        all_to_all = "row_exchange"
    counts: CollectiveName = "all_gather" if is_megatrons or on_cuda else all_to_all

    def shared(name: CollectiveName) -> LinkSet:
        intra = collective_link(cluster, name, "intra_node")
        inter = collective_link(cluster, name, "inter_node")
        near_of = near if intra is None else link_cost(intra)
        if inter is None:
            return LinkSet(near_of, far)
        of_all = link_cost(inter, cluster.devices_per_node)
        return LinkSet(near_of, LinkCost(inter.alpha_s, far.beta_s_per_byte), FREE, of_all)

    intra = collective_link(cluster, "point_to_point", "intra_node")
    inter = collective_link(cluster, "point_to_point", "inter_node")
    alone = FREE if inter is None else link_cost(inter)
    transfer = LinkSet(
        near if intra is None else link_cost(intra),
        far if inter is None else LinkCost(inter.alpha_s, far.beta_s_per_byte),
        alone,
    )
    return ClusterLinks(shared(all_to_all), transfer, shared(counts))


def topology_of(cluster: ClusterDescription, num_devices: int) -> Topology:
    """Nodes of an expert-parallel group whose devices follow each other on the cluster's nodes.

    Raises:
        ValueError: The group does not fit the nodes.
    """
    per_node = cluster.devices_per_node
    if num_devices > cluster.num_devices or (num_devices > per_node and num_devices % per_node):
        raise ValueError(
            f"cluster {cluster.name}: {num_devices} devices of an expert-parallel group do not fit "
            f"{cluster.num_nodes} nodes of {per_node}; wanted at most {cluster.num_devices}, whole nodes "
            "where there are several; change parallelism.expert or num_nodes (--cluster-set num_nodes=…)"
        )
    return Topology(tuple(device // per_node for device in range(num_devices)))
