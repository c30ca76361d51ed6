"""Computes the seconds of a transfer from the bytes on the busiest links of a cluster."""

from dataclasses import dataclass
from functools import lru_cache

from megatron_fssdp.config.cluster_description import ClusterDescription, CollectiveName
from megatron_fssdp.planning.cost.cluster_cost import collective_link, link_cost
from megatron_fssdp.planning.cost.cost_model import ClusterCost, LinkCost
from megatron_fssdp.planning.dispatch.token_dispatch import BusiestLinks
from megatron_fssdp.planning.placement.topology import Topology

COUNT_BYTES = 8
"""Bytes of one entry of the router counts that all devices gather."""

FREE = LinkCost(0.0, 0.0)


@dataclass(frozen=True, eq=False)
class LinkTimes:
    """Seconds of a transfer on links inside nodes and between nodes, which work at the same time.

    Attributes:
        near_s: Seconds on the link of the busiest device inside its node.
        far_s: Seconds on the NICs of the busiest node.
        near_start_s: Start-up seconds that ``near_s`` contains where the links are used.
        far_start_s: Start-up seconds that ``far_s`` contains where the NICs are used.
        in_turn: Whether the links inside nodes work after those between nodes, and not at the same time.
    """

    near_s: float = 0.0
    far_s: float = 0.0
    near_start_s: float = 0.0
    far_start_s: float = 0.0
    in_turn: bool = False

    @property
    def seconds(self) -> float:
        """Seconds until the transfers on both kinds of links have ended."""
        return self.near_s + self.far_s if self.in_turn else max(self.near_s, self.far_s)

    def at_least(self, least_s: float) -> "LinkTimes":
        """The same times, but no link that is used at all takes less than ``least_s``."""
        near_s, far_s = (max(busy_s, least_s) if busy_s else 0.0 for busy_s in (self.near_s, self.far_s))
        return LinkTimes(near_s, far_s)

    @property
    def is_far(self) -> bool:
        """Whether the NICs take at least as long as the links inside nodes."""
        return self.far_s >= self.near_s


@dataclass(frozen=True)
class LinkSet:
    """Costs of one collective on each kind of link.

    Attributes:
        near: Cost of a device's link inside its node.
        far_of_node: Cost of all NICs of a node together, which the node's devices share.
        far_of_device: Cost of the NICs when one device sends alone. Zero if unknown.
        far_of_all: Cost of a node's NICs when all nodes send and receive the same amount. Zero if unknown.
    """

    near: LinkCost
    far_of_node: LinkCost
    far_of_device: LinkCost = FREE
    far_of_all: LinkCost = FREE

    def times(
        self,
        busiest: BusiestLinks,
        bytes_per_unit: float,
        starts: int = 1,
        first_s: float = 0.0,
        in_turn: bool = False,
    ) -> LinkTimes:
        """Compute start-up plus transfer seconds of the busiest links (FasterMoE, Eq. 2; Parm, Eq. 12).

        Between nodes, the largest of three bounds counts: the bytes of the busiest node's NICs, the bytes of
        the busiest device, and the bytes of an average node at the bandwidth that remains when all NICs are
        busy.

        Args:
            busiest: Number of units (rows or experts) on the busiest links.
            bytes_per_unit: Bytes of one unit.
            starts: Number of collectives that share the bytes. Each one adds a start-up time.
            first_s: Seconds until the first bytes arrive at the busiest links. They count only where these
                links have bytes.
            in_turn: Whether the links inside nodes work after those between nodes.
        """
        near, of_node = busiest.near * bytes_per_unit, busiest.far_of_node * bytes_per_unit
        far_s = max(
            of_node * self.far_of_node.beta_s_per_byte,
            busiest.far_of_device * bytes_per_unit * self.far_of_device.beta_s_per_byte,
            busiest.far_of_mean_node * bytes_per_unit * self.far_of_all.beta_s_per_byte,
        )
        near_start_s, far_start_s = starts * self.near.alpha_s, starts * self.far_of_node.alpha_s
        return LinkTimes(
            near_start_s + first_s + near * self.near.beta_s_per_byte if near > 0 else 0.0,
            far_start_s + first_s + far_s if of_node > 0 else 0.0,
            near_start_s,
            far_start_s,
            in_turn,
        )


@dataclass(frozen=True)
class ClusterLinks:
    """Links of a cluster, as each kind of transfer uses them.

    Attributes:
        all_to_all: Links for dispatch and combine.
        transfer: Links for spAG, spRS and re-sharding, which send from device to device.
        counts: Links for router counts, which every device sends to every device.
    """

    all_to_all: LinkSet
    transfer: LinkSet
    counts: LinkSet

    def gather_counts_s(self, topology: Topology, num_experts: int) -> float:
        """Return the seconds in which every device gets the router counts of all other devices."""
        if topology.num_devices == 1:
            return 0.0
        smallest, largest = topology.smallest_and_largest_node
        others = float(topology.num_devices - smallest)
        busiest = BusiestLinks(float(largest - 1), others, others, others)
        return self.counts.times(busiest, COUNT_BYTES * num_experts).seconds


@lru_cache
def plain_links(cluster: ClusterCost) -> ClusterLinks:
    """Return the links of a cluster, with the same costs for every kind of transfer.

    Args:
        cluster: Link costs of the cluster, from a profile or a description.
    """
    links = LinkSet(cluster.intra, cluster.inter)
    return ClusterLinks(links, links, links)


def cluster_links(
    cluster: ClusterDescription, *, is_megatrons: bool = False, on_cuda: bool = True
) -> ClusterLinks:
    """Return the links of a cluster. Measured costs of single collectives replace the general link costs.

    Megatron's dispatcher calls torch's collectives. This package does the same on CUDA devices. Between CPUs,
    it exchanges rows and counts as point-to-point messages.

    A fitted all-to-all or all-gather gives the bandwidth of each device while all devices of all nodes use
    their NICs. A node therefore has this bandwidth times its number of devices. In an uneven all-to-all most
    NICs are idle, and the busiest node has the whole bandwidth ``inter_node`` of the description. A fitted
    point-to-point transfer limits one device. The limit of a node is ``inter_node`` here, too.

    Args:
        cluster: Description of the cluster.
        is_megatrons: Whether Megatron's own dispatcher moves the tokens.
        on_cuda: Whether the devices are CUDA devices.
    """
    near, far = link_cost(cluster.intra_node), link_cost(cluster.inter_node)

    all_to_all: CollectiveName = "all_to_all"
    if not is_megatrons and "row_exchange" in cluster.collectives:
        all_to_all = "row_exchange"
    counts: CollectiveName = "all_gather" if is_megatrons or on_cuda else all_to_all

    def shared(name: CollectiveName) -> LinkSet:
        """Costs of a collective that all devices of the group take part in."""
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
    """Return the nodes of an expert-parallel group whose devices fill one node after the other.

    Args:
        cluster: Description of the cluster.
        num_devices: Number of devices of the group.

    Raises:
        ValueError: The group does not fit the nodes.
    """
    per_node = cluster.devices_per_node
    if num_devices > cluster.num_devices or (num_devices > per_node and num_devices % per_node):
        raise ValueError(
            f"cluster {cluster.name}: {num_devices} devices of an expert-parallel group do not fit on "
            f"{cluster.num_nodes} nodes of {per_node} devices; wanted at most {cluster.num_devices} devices, "
            "and whole nodes if there are several; change expert_model_parallel_size or num_nodes "
            "(--cluster-set num_nodes=…)"
        )
    return Topology(tuple(device // per_node for device in range(num_devices)))
