"""Parm's two testbeds: the ranks of each group of a layer, and the costs of their collectives.

The paper publishes the costs, alpha and beta, of only one collective on each testbed: MP-AllGather (§VI-B).
All other costs follow from these two numbers, Table II, the data sheets and, on testbed A, one time of
Table V:

* A GPU has one PCIe link. In each direction its bandwidth is the one that beta gives for a ring. All data
  that leaves the GPU uses this link, also data for other nodes. There is no NVLink.
* The GPUs of a node share one 100 Gb/s NIC.
* Every collective takes its start-ups plus the time of its busiest link. An all-reduce is a reduce-scatter
  and an all-gather (§IV-B).
* A collective among n ranks has n - 1 steps: those of a ring, or one message to each other rank. The
  published alpha is divided by the steps of its own group and multiplied by those of the collective.
* SAA saves no start-ups. Its gather and its all-to-all share the links. The pair takes the time in which the
  busiest link sends the bytes of both.
* MP and ESP groups consist of consecutive ranks, inside one node. Ranks of an EP group have a distance of
  N_ESP, so they are on several nodes if there are several (§III-A, Case 2 of §IV-B, Eq. 9).
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from megatron_fssdp.config.cluster_description import load_cluster
from megatron_fssdp.planning.cost.cost_model import LinkCost
from megatron_fssdp.planning.cost.tensor_schedules import Group, Kind, ScheduleCosts

PUBLISHED_ALL_GATHER = {"parm-a": (6.64e-4, 5.38e-10), "parm-b": (1.09e-4, 7.14e-10)}
"""Alpha in seconds and beta in seconds per element of MP-AllGather (§VI-B; per element: §V-A)."""

PEAK_FLOPS_PER_S = {
    ("parm-a", 4): 82.6e12,  # RTX 4090, fp32
    ("parm-a", 2): 165.2e12,  # fp16 tensor cores, fp32 accumulation
    ("parm-b", 4): 13.45e12,  # RTX 2080 Ti, fp32
    ("parm-b", 2): 53.8e12,  # fp16 tensor cores, fp32 accumulation
}
"""Peak throughput of a GPU by testbed and bytes of a number (public data sheets)."""


ALL_TO_ALL_SLOWDOWN_ON_A = 2.0
"""Time of a byte of an all-to-all on testbed A, divided by that of a byte of an all-gather.

Derived from Table V: Parm's MoE layers of BERT-Base take 567 - 203 = 364 ms on testbed A
(``parm.published_outside_ms``). The simulated ones take as long with a slowdown of 2.0, and 250 ms with 1.0.
A reason exists: the published beta is that of an MP group, whose four ranks lie on one of two CPU sockets,
and GPUs of this kind have no peer-to-peer access.
"""


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about values that the paper does not state.

    Rows named "(ours)" show what each of them changes.
    """

    element_bytes: int = 4
    """Bytes of a number. The paper does not mention mixed precision, so this is fp32."""
    share_of_peak: float = 0.9
    """Share of the peak throughput that expert GEMMs reach. 0.9 was measured on a V100 (FasterMoE, §3.1).

    Parm does not state its own; its Fig. 1 excludes one half.
    """
    ranks_of_fit: int = 4  # of the MP group on which the published alpha and beta were measured
    startups: Literal["by ranks", "equal"] = "by ranks"
    """Whether alpha grows with the steps of a collective, or every collective has the published one."""
    top_k: int = 1  # Table III does not state it, and only k times f matters
    layers: Literal["square", "smaller half", "all", "unscaled"] = "square"  # see parm_layers.py
    slowdown_of_all_to_all: float = ALL_TO_ALL_SLOWDOWN_ON_A  # factor on beta on testbed A


AS_TAKEN = Assumptions()


@dataclass(frozen=True)
class Span:
    """A group's ranks, and how many of them each node has."""

    num_ranks: int
    num_near: int


def spans_of(n_mp: int, n_esp: int, num_devices: int, devices_per_node: int) -> dict[Group, Span]:
    """Return the distribution of each kind of group over the nodes of a testbed."""
    n_ep = num_devices // n_esp
    return {
        "mp": Span(n_mp, min(n_mp, devices_per_node)),
        "esp": Span(n_esp, min(n_esp, devices_per_node)),
        "ep": Span(n_ep, min(n_ep, max(1, devices_per_node // n_esp))),
        "ep_esp": Span(num_devices, min(num_devices, devices_per_node)),
    }


@dataclass(frozen=True)
class Testbed:
    """A number of GPUs of one of the testbeds."""

    __test__ = False  # pytest must not collect this class as a test

    cluster: str  # name of the testbed's description, which gives nodes and NICs
    num_devices: int  # P
    assumptions: Assumptions = AS_TAKEN

    @property
    def flops_per_s(self) -> float:
        """Throughput of a GPU on expert GEMMs, in floating-point operations per second."""
        peak = PEAK_FLOPS_PER_S[self.cluster, self.assumptions.element_bytes]
        return self.assumptions.share_of_peak * peak

    @property
    def link_bytes_per_s(self) -> float:
        """Bandwidth of a GPU's link.

        The published beta is that of a ring, where a rank sends all parts but one.
        """
        ranks = self.assumptions.ranks_of_fit
        _, beta_s_per_element = PUBLISHED_ALL_GATHER[self.cluster]
        return (ranks - 1) / ranks * self.assumptions.element_bytes / beta_s_per_element

    def alpha_s(self, num_ranks: int) -> float:
        """Start-up seconds of an all-gather, a reduce-scatter or an all-to-all among some ranks."""
        alpha_s, _ = PUBLISHED_ALL_GATHER[self.cluster]
        if self.assumptions.startups == "equal":
            return alpha_s
        return alpha_s * (num_ranks - 1) / (self.assumptions.ranks_of_fit - 1)

    def costs(self, n_mp: int, n_esp: int) -> ScheduleCosts:
        """Return the costs of all collectives of the groups."""
        return _costs(self, n_mp, n_esp)


@cache
def _costs(testbed: Testbed, n_mp: int, n_esp: int) -> ScheduleCosts:
    description = load_cluster(testbed.cluster)
    per_node = description.devices_per_node
    link, nic = testbed.link_bytes_per_s, description.inter_node.bandwidth_bytes_per_s
    slowdown = testbed.assumptions.slowdown_of_all_to_all if testbed.cluster == "parm-a" else 1.0
    spans = spans_of(n_mp, n_esp, testbed.num_devices, per_node)
    costs: dict[tuple[Kind, Group], LinkCost] = {}
    for group, span in spans.items():
        alpha_s = testbed.alpha_s(span.num_ranks)
        leaving = (span.num_ranks - 1) / span.num_ranks
        # The rings of all groups with ranks in a node cross its NIC, each ring once.
        rings = per_node / span.num_near if span.num_ranks > span.num_near else 0.0
        gather = max(leaving / link, rings * leaving / nic)
        costs["all_gather", group] = costs["reduce_scatter", group] = LinkCost(alpha_s, gather)
        costs["all_reduce", group] = LinkCost(2 * alpha_s, 2 * gather)
        far = (span.num_ranks - span.num_near) / span.num_ranks
        costs["all_to_all", group] = LinkCost(alpha_s, slowdown * max(leaving / link, per_node * far / nic))
    # The time that the all-to-all adds to MP-AllGather, which has E·T·M bytes where the all-to-all has
    # E·T·M·N_ESP / N_MP. On the link, all of its bytes add time, because the gather uses the link as well. On
    # the NIC, only the bytes add time that do not fit into the time of the gather.
    everyone = spans["ep_esp"]
    beside = costs["all_gather", "mp"].beta_s_per_byte * n_mp / n_esp
    on_link = slowdown * (everyone.num_ranks - 1) / everyone.num_ranks / link
    on_nic = per_node * (everyone.num_ranks - everyone.num_near) / everyone.num_ranks / nic
    alpha_s = testbed.alpha_s(everyone.num_ranks)
    costs["overlapped_all_to_all", "ep_esp"] = LinkCost(alpha_s, max(on_link, on_nic - beside))
    return costs
