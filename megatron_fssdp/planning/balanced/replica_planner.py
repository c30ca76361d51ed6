"""Plans one layer's replicas by one search for the fewest modelled seconds.

This planner is ours and goes beyond the papers. Hecate (§4.2) replicates as many experts as can be
transferred during the compute before the layer, and Alg. 1 sets numbers of replicas by load. But one more
expert may save more seconds than its transfer exposes, and where a replica goes decides which links carry
tokens.

The search (``planning/kernels/replica_search.py``) compares all placements by one price, the seconds of
``layer_seconds``. It has these steps:

1. **Seeds.** Owners only; the hottest 1, 2, … experts on all devices (FasterMoE's choice); and the steps of
   Pro-Prophet's search, with 0, 1, 2, 4, … devices left out. So the result costs at most what they cost.
   The caller may add the placement of an earlier search.
2. **Levels**, where there are several nodes: descents from the owners with at most 1, 2, … experts over each
   NIC. They lower a smooth price, with sums of fourth powers in place of highest values, and at the best
   levels then the price. In one node there is one such descent.
3. **Even seeds.** Owners give load away until they keep a part of the mean load. With several nodes there are
   as many seeds again in which each of these experts is in all nodes.
4. **Descent** from the best placement by the price, then by the smooth price and again by the price. It moves
   experts of the busiest device first and of the busiest link next, because the price is made of highest
   values. A move adds a replica, removes one, moves one to another device, puts one in place of another,
   or lets two of them exchange their devices.
   The smooth price after a move follows from the loads that the move changes. For the price, the expert is
   taken out first. It is skipped if the layer without it costs as much: other experts decide the price then.
5. **Kicks**: all replicas of one expert change at once, and a descent follows.
6. Replicas without which the best placement costs no more are dropped.

Without measured costs, the price is the highest device load. The search is deterministic: it stops after a
number of prices, not seconds, so all ranks find the same placement.

Shape letters: D devices, E experts, N nodes.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megatron_fssdp.planning.arrays import checked_load
from megatron_fssdp.planning.balanced.search_costs import SearchCosts
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.kernels import replica_search
from megatron_fssdp.planning.native.kernel import Kernel
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology

LEAST_SAVING = 0.01
"""Smallest saving of all replicas together, as a part of the seconds without replicas.

Smaller savings are within the error of the model.
"""

PRICES_PER_SIZE = 64
"""Prices of the descents before the kicks, divided by the number of experts and devices together.

It bounds the time of unusual layers.
"""

price_replicas = Kernel(replica_search.price_replicas)
search_replicas = Kernel(replica_search.search_replicas)


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
        """Seconds of the layer under a placement, as the search counts them.

        Args:
            placement: Owners and replicas.
        """
        return self._price_s(placement.present_ED)

    @cached_property
    def plain_s(self) -> float:
        """Seconds of the layer without replicas."""
        return self._price_s(np.zeros(self.load_DE.shape[::-1], np.bool_))

    def best_placement(
        self,
        *,
        slots: int,
        most_replicated: int,
        least_saving: float = LEAST_SAVING,
        start: ExpertPlacement | None = None,
    ) -> tuple[ExpertPlacement, float]:
        """The placement that the search finds, and its seconds.

        Args:
            slots: Most replicas that a device may hold, m.
            most_replicated: Most experts that may have replicas, t.
            least_saving: Smallest saving of all replicas, as a part of the seconds without replicas.
            start: Placement within these limits, which serves as one more seed; with equal owners.

        Raises:
            ValueError: ``start`` has other owners, or a device with more than ``slots`` replicas.
        """
        shape = self.load_DE.shape[::-1]
        # The kernel has room for ``slots`` replicas on a device, and does not look at more.
        if start is not None and (
            start.replicas_per_device_D.max() > slots or not np.array_equal(start.owner_E, self.owner_E)
        ):
            raise ValueError(
                f"start has up to {start.replicas_per_device_D.max()} replicas on a device: wanted at most "
                f"slots = {slots}, and the owners of the layer"
            )
        plain = ExpertPlacement.owners_only(self.owner_E, shape[1])
        if not slots or not most_replicated or not self.load_DE.any():
            return plain, self.plain_s
        present = (start or plain).present_ED.astype(np.int64).reshape(-1)
        num_prices = PRICES_PER_SIZE * sum(shape)
        limits = slots, most_replicated, num_prices, least_saving, self.costs.counts_s
        seconds = search_replicas(*self._arrays, *limits, present)
        placement = ExpertPlacement(self.owner_E, present.reshape(shape).astype(np.bool_), slots=slots)
        return placement, seconds

    def _price_s(self, present_ED: np.ndarray) -> float:
        """Seconds of the layer if the owners and the devices of ``present_ED`` have the experts."""
        seconds: float = price_replicas(*self._arrays, self.costs.counts_s, present_ED.view(np.uint8))
        return seconds

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        """The first arguments of the kernels."""
        topology = self.topology
        return (
            np.ascontiguousarray(self.load_DE.T).reshape(-1),
            np.ascontiguousarray(topology.sum_over_nodes(self.load_DE).T).reshape(-1),
            self.owner_E,
            topology.node_of_device_D,
            topology.first_N,
            topology.by_node_D,
            self.costs.layer,
            self.costs.hops,
        )


def plan_replicas(
    owner_E: np.ndarray,
    load_DE: np.ndarray,
    topology: Topology,
    *,
    slots: int,
    profile: LayerProfile,
    overlap_degree: int | None = None,
    rematerialize: bool = False,
    hides: bool = True,
) -> ExpertPlacement:
    """Plan the placement with the fewest modelled seconds that the search finds.

    Args:
        owner_E: Owner of every expert, integers ``[E]``.
        load_DE: Expected (token, k) pairs of an iteration by source device and expert, ``[D, E]``.
        topology: Nodes of the devices.
        slots: Most replicas that a device may hold, m.
        profile: Measured costs of the layer and the links, the same numbers on all ranks.
        overlap_degree: Most experts that may be replicated, t. None means no limit.
        rematerialize: Whether replicas are gathered and reduced with every micro-batch.
        hides: Whether transfers run beside compute.

    Returns:
        A placement whose modelled seconds are at most those without replicas. It has no replicas if they
        would save less than :data:`LEAST_SAVING`.

    Raises:
        ValueError: The loads do not match the owners and devices, or a limit is negative.
    """
    plain, load = _checked(owner_E, load_DE, topology, slots, overlap_degree)
    layer = layer_search(
        plain.owner_E,
        load,
        topology,
        profile,
        rematerialize=rematerialize,
        hides=hides,
    )
    degree = plain.num_experts if overlap_degree is None else overlap_degree
    return layer.best_placement(slots=slots, most_replicated=degree)[0]


def plan_materialization(
    owner_E: np.ndarray, load_DE: np.ndarray, topology: Topology, *, overlap_degree: int, slots: int
) -> ExpertPlacement:
    """Plan the placement with the lowest highest device load that the search finds.

    It is the same search as that of :func:`plan_replicas`. It serves where no costs are measured: transfers
    of ``overlap_degree`` experts count as hidden, so they cost nothing.

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
    plain, load = _checked(owner_E, load_DE, topology, slots, overlap_degree)
    costs = SearchCosts.of_loads(topology, float(load.sum()) / topology.num_devices)
    layer = LayerSearch(plain.owner_E, load, topology, costs)
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
    """One layer with measured costs, to price several placements.

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


def _checked(
    owner_E: np.ndarray, load_DE: np.ndarray, topology: Topology, slots: int, overlap_degree: int | None
) -> tuple[ExpertPlacement, np.ndarray]:
    """The placement without replicas, and the loads as float64, after checks of the arguments."""
    plain = ExpertPlacement.owners_only(owner_E, topology.num_devices)
    load = checked_load(
        load_DE,
        "load_DE",
        (plain.num_devices, plain.num_experts),
        "by source device of the topology and expert of owner_E",
    )
    if (overlap_degree is not None and overlap_degree < 0) or slots < 0:
        raise ValueError(
            f"overlap_degree is {overlap_degree} and slots is {slots}: wanted 0 or more of each; "
            "0 of either means no replicas"
        )
    return plain, load
