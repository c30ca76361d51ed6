"""Plans one layer's replicas by one search for the fewest modelled seconds.

This planner is ours and goes beyond the papers. Hecate (§4.2) replicates as many experts as can be
transferred during the compute before the layer, and Alg. 1 sets numbers of replicas by load. But one more
expert may save more seconds than its transfer exposes, and where a replica goes decides which links carry
tokens.

The search (``Search`` in ``kernels.py``) compares all placements by one price, the seconds of
``layer_seconds``:

1. **Seeds.** Owners only; the hottest 1, 2, … experts on all devices (FasterMoE's choice); water filling, in
   which owners give load away until they keep a part of the mean load, at six levels, and with several nodes
   again so that each of these experts is in all nodes; and a placement of the caller, such as the last one.
2. **A climb** from owners only, by a smooth price, in which all devices count, the highest ones most. It is
   repeated while 1, 2, 4, … experts on each link cost nothing: one replica makes a whole transfer longer, and
   the next ones over other links are then free.
3. **Descents** from the best placement so far, by the exact price, the smooth one and the exact one again. A
   step looks at the experts with the largest parts of the busiest device, and of the busiest link. It adds a
   replica, drops one, puts one into every node or everywhere, or, by the exact price, swaps one with the
   least useful replica of a full device. An expert that saved nothing is not looked at again in the same
   descent. Then **kicks**: all replicas of one expert are changed at once, and a descent follows; what gains
   is kept.
4. Replicas without which the placement costs no more are dropped.

An expert is taken out once for all its moves. The price of a move then follows from the highest values
without the expert and from what it adds. Without measured costs, the price is the highest device load. The
search is deterministic: it stops after a number of prices, not seconds, so all ranks find the same placement.

Shape letters: D devices, E experts, N nodes.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megatron_fssdp.planning.arrays import checked_load
from megatron_fssdp.planning.compiled_form import kernels
from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD, LinkCost
from megatron_fssdp.planning.cost.deduplicated_traffic import tokens_per_pair
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import DISPATCH_STARTS, PROB_BYTES, counts_seconds
from megatron_fssdp.planning.cost.link_seconds import plain_links
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.message_size import gather_stages, num_batches, reduction_stages

LEAST_SAVING = 0.01
"""Smallest saving of all replicas together, as a part of the seconds without replicas.

Smaller savings are within the error of the model.
"""

PRICES_PER_SIZE = 12
"""Most prices of the descent, divided by the number of experts and devices together.

It bounds the time of unusual layers.
"""

TRANSFER_OVER_LOAD = 5e-4
"""Cost of one more expert on a link where no costs are measured, as a part of the mean device load.

The search then lowers the highest device load. This small cost leaves out replicas that hardly lower it.
"""


@dataclass(frozen=True, eq=False)
class SearchCosts:
    """Costs of one layer, in which every formula of ``layer_seconds`` is worked out as far as possible.

    Pairs of numbers are float64 ``[2]``. All are seconds.

    Attributes:
        dispatch_near: Start-up of a dispatch inside nodes, and what each pair takes there.
        dispatch_far: The same between nodes, and so on for the combine.
        combine_near: Start-up and pair.
        combine_far: Start-up and pair.
        per_token: What the experts take for a pair in both passes of an iteration.
        times: Number of micro-batches.
        start: Start-up of a transfer inside nodes and between nodes.
        gather: What one expert takes on a link inside nodes and between nodes.
        reduce: The same for its gradient.
        hidden: Compute that hides a gather.
        hidden_back: Compute that hides a reduction.
        each_pass: Whether every micro-batch gathers replicas twice and reduces their gradients once.
        of_hops: For each number of hops of a gather the seconds of a message inside nodes and between nodes,
            and the least seconds of the whole; then the same for a reduction. Float64 ``[H, 6]``.
        counts_s: Router counts of an iteration, which every placement pays.
    """

    dispatch_near: np.ndarray
    dispatch_far: np.ndarray
    combine_near: np.ndarray
    combine_far: np.ndarray
    per_token: float
    times: float
    start: np.ndarray
    gather: np.ndarray
    reduce: np.ndarray
    hidden: float
    hidden_back: float
    each_pass: bool
    of_hops: np.ndarray
    counts_s: float

    @classmethod
    def of_loads(cls, topology: Topology, mean_load: float) -> "SearchCosts":
        """Costs with which a layer takes as long as the highest device load says.

        Args:
            topology: Nodes of the devices.
            mean_load: Mean load of a device.
        """
        free, experts = np.zeros(2), np.full(2, TRANSFER_OVER_LOAD * mean_load)
        of_hops = np.zeros((_most_hops(topology) + 1, 6))
        return cls(free, free, free, free, 1.0, 1.0, free, experts, free, 0.0, 0.0, False, of_hops, 0.0)

    @classmethod
    def of_profile(
        cls,
        profile: LayerProfile,
        topology: Topology,
        num_experts: int,
        *,
        rematerialize: bool,
        hides: bool,
    ) -> "SearchCosts":
        """Measured costs, with which a layer takes the seconds of :func:`layer_seconds`.

        Args:
            profile: Measured costs of the layer and the links.
            topology: Nodes of the devices.
            num_experts: Number of experts, E.
            rematerialize: Whether every micro-batch gathers replicas twice and reduces their gradients once.
            hides: Whether transfers run beside compute.
        """
        cluster, times, links = profile.cluster, profile.num_micro_batches, plain_links(profile.cluster)
        rows, (near, far) = links.all_to_all, (links.transfer.near, links.transfer.far_of_node)
        counts_s = counts_seconds(profile, topology, num_experts)
        sent_bytes = (profile.token_bytes + PROB_BYTES) / times
        of_near, of_far = 1.0, 1.0
        if (choices := profile.sent_choices) is not None:
            of_near, of_far = tokens_per_pair(topology, num_experts, choices)
        reduced_bytes = profile.expert_bytes if rematerialize else profile.reduced_bytes
        betas = np.array([near.beta_s_per_byte, far.beta_s_per_byte], np.float64)
        of_hops = np.zeros((_most_hops(topology) + 1, 6))
        for hops in range(1, len(of_hops)):
            for first, num_bytes, stages in (
                (0, profile.expert_bytes, gather_stages(hops)),
                (3, reduced_bytes, reduction_stages(hops)),
            ):
                message = profile.messages.message_bytes(num_bytes, stages)
                host_s = profile.messages.batch_host_s * num_batches(num_bytes, message, hops)
                of_hops[hops, first : first + 3] = near.time_s(message), far.time_s(message), host_s
        return cls(
            dispatch_near=_line(rows.near, DISPATCH_STARTS, of_near * sent_bytes),
            dispatch_far=_line(rows.far_of_node, DISPATCH_STARTS, of_far * sent_bytes),
            combine_near=_line(rows.near, 1, of_near * profile.token_bytes / times),
            combine_far=_line(rows.far_of_node, 1, of_far * profile.token_bytes / times),
            per_token=(1 + BACKWARD_PER_FORWARD) * profile.flops_per_token / cluster.expert_flops_per_s,
            times=float(times),
            start=np.array([near.alpha_s, far.alpha_s], np.float64),
            gather=float(profile.expert_bytes) * betas,
            reduce=float(reduced_bytes) * betas,
            hidden=profile.non_moe_s + counts_s if hides else 0.0,
            hidden_back=BACKWARD_PER_FORWARD * profile.non_moe_s if hides else 0.0,
            each_pass=rematerialize,
            of_hops=of_hops,
            counts_s=times * counts_s,
        )


@dataclass(frozen=True, eq=False)
class LayerSearch:
    """One layer as the search gets it.

    Attributes:
        owner_E: Owner of every expert, int64 ``[E]``.
        load_DE: (token, k) pairs by source device and expert, float64 ``[D, E]``.
        topology: Nodes of the devices.
        costs: Costs of the layer.
    """

    owner_E: np.ndarray
    load_DE: np.ndarray
    topology: Topology
    costs: SearchCosts

    def seconds(self, placement: ExpertPlacement) -> float:
        """Seconds of the layer under a placement, as the search counts them."""
        arguments = self._arguments(0, placement.present_ED)
        return float(kernels().price_replicas(arguments)) + self.costs.counts_s

    @cached_property
    def plain_s(self) -> float:
        """Seconds of the layer without replicas."""
        return self.seconds(ExpertPlacement.owners_only(self.owner_E, self.topology.num_devices))

    def best_placement(
        self,
        *,
        slots: int,
        most_replicated: int,
        start: ExpertPlacement | None = None,
    ) -> tuple[ExpertPlacement, float]:
        """The placement that the search finds, and its seconds.

        It has no replicas if they would save less than :data:`LEAST_SAVING`.

        Args:
            slots: Most replicas that a device may hold, m.
            most_replicated: Most experts that may have replicas, t.
            start: Placement within these limits, which serves as one more seed; with equal owners.

        Raises:
            ValueError: ``start`` has other owners, or a device with more than ``slots`` replicas.
        """
        if start is not None and (
            start.replicas_per_device_D.max() > slots or not np.array_equal(start.owner_E, self.owner_E)
        ):
            raise ValueError(
                f"start has up to {start.replicas_per_device_D.max()} replicas on a device: wanted at most "
                f"slots = {slots}, and the owners of the layer"
            )
        num_devices, num_experts = self.load_DE.shape
        plain = ExpertPlacement.owners_only(self.owner_E, num_devices)
        if not slots or not most_replicated or not self.load_DE.any():
            return plain, self.plain_s
        plain_s, found_s, present_ED = kernels().search_replicas(
            self._arguments(slots, plain.present_ED),
            most_replicated,
            PRICES_PER_SIZE * (num_experts + num_devices),
            memoryview((start or plain).present_ED.astype(np.uint8)),
        )
        fixed_s = self.costs.counts_s
        if found_s + fixed_s > (1 - LEAST_SAVING) * (plain_s + fixed_s):
            return plain, plain_s + fixed_s
        return ExpertPlacement(self.owner_E, present_ED.astype(np.bool_), slots=slots), found_s + fixed_s

    def _arguments(self, slots: int, present_ED: np.ndarray) -> tuple[object, ...]:
        """The arguments of ``kernels.Layer``."""
        topology = self.topology
        load_EN = topology.sum_over_nodes(self.load_DE).T
        loads = (memoryview(np.array(load, order="C")) for load in (self.load_DE.T, load_EN))
        nodes = tuple(memoryview(np.array(numbers)) for numbers in topology.arrays)
        return *loads, memoryview(np.array(self.owner_E)), nodes, self.costs, slots, present_ED


def plan_materialization(
    owner_E: np.ndarray, load_DE: np.ndarray, topology: Topology, *, overlap_degree: int, slots: int
) -> ExpertPlacement:
    """Plan the placement with the lowest highest device load that the search finds.

    It serves where no costs are measured: transfers of ``overlap_degree`` experts count as hidden, so they
    cost nothing.

    Args:
        owner_E: Owner of every expert, integers ``[E]``.
        load_DE: Expected load by source device and expert, ``[D, E]``, in any non-negative unit.
        topology: Nodes of the devices.
        overlap_degree: Most experts that may be replicated, t.
        slots: Most replicas that a device may hold, m.

    Returns:
        A placement whose highest device load is at most the one without replicas. It has no replicas if they
        would lower it by less than :data:`LEAST_SAVING`.

    Raises:
        ValueError: The loads do not match the owners and devices, or a limit is negative.
    """
    owner = ExpertPlacement.owners_only(owner_E, topology.num_devices).owner_E
    load = checked_load(
        load_DE,
        "load_DE",
        (topology.num_devices, len(owner)),
        "by source device of the topology and expert of owner_E",
    )
    if overlap_degree < 0 or slots < 0:
        raise ValueError(
            f"overlap_degree is {overlap_degree} and slots is {slots}: wanted 0 or more of each; "
            "0 of either means no replicas"
        )
    costs = SearchCosts.of_loads(topology, float(load.sum()) / topology.num_devices)
    layer = LayerSearch(owner, load, topology, costs)
    return layer.best_placement(slots=slots, most_replicated=overlap_degree)[0]


def layer_search(
    owner_E: np.ndarray,
    load_DE: np.ndarray,
    topology: Topology,
    profile: LayerProfile,
    *,
    rematerialize: bool,
    hides: bool,
) -> LayerSearch:
    """One layer with measured costs.

    Args:
        owner_E: Owner of every expert, int64 ``[E]``.
        load_DE: (token, k) pairs of an iteration by source device and expert, ``[D, E]``.
        topology: Nodes of the devices.
        profile: Measured costs of the layer and the links.
        rematerialize: Whether replicas are gathered and reduced with every micro-batch.
        hides: Whether transfers run beside compute.
    """
    costs = _measured_costs(profile, topology, len(owner_E), rematerialize, hides)
    return LayerSearch(owner_E, np.asarray(load_DE, np.float64), topology, costs)


@lru_cache(maxsize=16)
def _measured_costs(
    profile: LayerProfile, topology: Topology, num_experts: int, rematerialize: bool, hides: bool
) -> SearchCosts:
    """The costs of a search. All layers of a model have equal ones, and they take longer than a price."""
    return SearchCosts.of_profile(profile, topology, num_experts, rematerialize=rematerialize, hides=hides)


def _line(link: LinkCost, starts: int, num_bytes: float) -> np.ndarray:
    """Start-up seconds of a collective, and its seconds for each pair of ``num_bytes``."""
    return np.array([starts * link.alpha_s, num_bytes * link.beta_s_per_byte], np.float64)


def _most_hops(topology: Topology) -> int:
    """Most hops of a path: one for each other node, and in a node the depth of a tree over its devices."""
    return topology.num_nodes + topology.num_devices.bit_length()
