"""Parm's two testbeds: where the groups of a layer lie, and what their collectives cost over the links there.

Of all costs the paper publishes alpha and beta of one collective, MP-AllGather, on each testbed (§VI-B).
The others follow from those two, Table II and the data sheets:

* A GPU has one PCIe link, in each direction as fast as that beta says of a ring. All that leaves the GPU
  takes it, also for other nodes: there is no NVLink.
* The GPUs of a node share one 100 Gb/s NIC.
* A collective takes alpha, whatever it is and whomever among, and as long as its busiest link is busy. An
  all-reduce is a reduce-scatter and an all-gather (§IV-B).
* SAA saves no start-ups. Its gather and its all-to-all share the links: the pair takes as long as the busiest
  link has bytes of both.
* MP and ESP groups are consecutive ranks, so inside a node; ranks of an EP group are N_ESP apart, so across
  nodes where there are several (§III-A, Case 2 of §IV-B, Eq. 9).
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.cluster_files import load_cluster
from megatron_fssdp.planning.cost.cost_model import LinkCost
from megatron_fssdp.planning.cost.tensor_schedules import Group, Kind, ScheduleCosts

PUBLISHED_ALL_GATHER = {"parm-a": (6.64e-4, 5.38e-10), "parm-b": (1.09e-4, 7.14e-10)}
"""Alpha in seconds and beta in seconds an element of MP-AllGather (§VI-B; per element: §V-A)."""

PEAK_FLOPS_PER_S = {
    ("parm-a", 4): 82.6e12,  # RTX 4090, fp32
    ("parm-a", 2): 165.2e12,  # fp16 tensor cores, fp32 accumulation
    ("parm-b", 4): 13.45e12,  # RTX 2080 Ti, fp32
    ("parm-b", 2): 53.8e12,  # fp16 tensor cores, fp32 accumulation
}
"""By testbed and bytes of a number (public data sheets)."""


@dataclass(frozen=True)
class Assumptions:
    """What the paper leaves open; no default is chosen by what comes out.

    Attributes:
        element_bytes: Of a number. The paper names no mixed precision, so fp32.
        share_of_peak: That expert GEMMs reach; half, as in the descriptions of all clusters here.
        ranks_of_fit: Ranks of the MP group that the published beta was measured with; the largest.
        top_k: Experts of a token; Table III has none, so one. Only k times f counts.
        layers: Which of Table III's are taken, see ``parm_layers``.
        slowdown_of_all_to_all: Factor on beta of all-to-alls on testbed A, to see what it would do.
    """

    element_bytes: int = 4
    share_of_peak: float = 0.5
    ranks_of_fit: int = 4
    top_k: int = 1
    layers: Literal["smaller half", "all", "square", "unscaled"] = "smaller half"
    slowdown_of_all_to_all: float = 1.0


AS_TAKEN = Assumptions()


@dataclass(frozen=True)
class Span:
    """How the ranks of a group lie.

    Attributes:
        num_ranks: Of a group.
        num_near: Of them in one node; the same in each.
    """

    num_ranks: int
    num_near: int


def spans_of(n_mp: int, n_esp: int, num_devices: int, devices_per_node: int) -> dict[Group, Span]:
    """How each kind of group lies on a testbed.

    Args:
        n_mp: Ranks of an MP group.
        n_esp: Ranks of an ESP group.
        num_devices: P; the EP groups and ESP groups take all of them.
        devices_per_node: GPUs of a node.
    """
    n_ep = num_devices // n_esp
    return {
        "mp": Span(n_mp, min(n_mp, devices_per_node)),
        "esp": Span(n_esp, min(n_esp, devices_per_node)),
        "ep": Span(n_ep, min(n_ep, max(1, devices_per_node // n_esp))),
        "ep_esp": Span(num_devices, min(num_devices, devices_per_node)),
    }


@dataclass(frozen=True)
class Testbed:
    """GPUs of one of the testbeds.

    Attributes:
        cluster: Name of its description; nodes and NICs are taken from there.
        num_devices: P.
        assumptions: What is assumed.
    """

    __test__ = False  # for pytest: the word is the paper's

    cluster: str
    num_devices: int
    assumptions: Assumptions = AS_TAKEN

    @property
    def description(self) -> ClusterDescription:
        """Nodes and NICs."""
        return load_cluster(self.cluster)

    @property
    def flops_per_s(self) -> float:
        """Of a GPU on expert GEMMs."""
        peak = PEAK_FLOPS_PER_S[self.cluster, self.assumptions.element_bytes]
        return self.assumptions.share_of_peak * peak

    @property
    def link_bytes_per_s(self) -> float:
        """Of a GPU's link: the published beta is of a ring, in which a rank sends all parts but one."""
        ranks = self.assumptions.ranks_of_fit
        _, beta_s_per_element = PUBLISHED_ALL_GATHER[self.cluster]
        return (ranks - 1) / ranks * self.assumptions.element_bytes / beta_s_per_element

    def costs(self, n_mp: int, n_esp: int) -> ScheduleCosts:
        """Of all collectives among the groups."""
        return _costs(self, n_mp, n_esp)


@cache
def _costs(testbed: Testbed, n_mp: int, n_esp: int) -> ScheduleCosts:
    description, per_node = testbed.description, testbed.description.devices_per_node
    alpha_s, _ = PUBLISHED_ALL_GATHER[testbed.cluster]
    link, nic = testbed.link_bytes_per_s, description.inter_node.bandwidth_bytes_per_s
    slowdown = testbed.assumptions.slowdown_of_all_to_all if testbed.cluster == "parm-a" else 1.0
    spans = spans_of(n_mp, n_esp, testbed.num_devices, per_node)
    found: dict[tuple[Kind, Group], LinkCost] = {}
    for group, span in spans.items():
        leaving = (span.num_ranks - 1) / span.num_ranks
        # Rings of all the groups with ranks in a node cross its NIC, each of them once.
        rings = per_node / span.num_near if span.num_ranks > span.num_near else 0.0
        gather = max(leaving / link, rings * leaving / nic)
        found["all_gather", group] = found["reduce_scatter", group] = LinkCost(alpha_s, gather)
        found["all_reduce", group] = LinkCost(2 * alpha_s, 2 * gather)
        far = (span.num_ranks - span.num_near) / span.num_ranks
        found["all_to_all", group] = LinkCost(alpha_s, slowdown * max(leaving / link, per_node * far / nic))
    # What the all-to-all adds to MP-AllGather, whose bytes are E·T·M for the all-to-all's E·T·M·N_ESP / N_MP:
    # all its own on the link, where the gather's are too, and on the NIC what the gather leaves time for.
    everyone = spans["ep_esp"]
    beside = found["all_gather", "mp"].beta_s_per_byte * n_mp / n_esp
    on_link = slowdown * (everyone.num_ranks - 1) / everyone.num_ranks / link
    on_nic = per_node * (everyone.num_ranks - everyone.num_near) / everyone.num_ranks / nic
    found["overlapped_all_to_all", "ep_esp"] = LinkCost(alpha_s, max(on_link, on_nic - beside))
    return found
