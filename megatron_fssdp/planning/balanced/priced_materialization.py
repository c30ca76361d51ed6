"""How many experts to replicate when their transfers cost more than compute hides.

Ours, beyond the papers. Hecate (§4.2) replicates as many experts as travel under the compute
before the layer and no more. But one more may save more than its transfer exposes, and one less may cost
nothing; so here the modelled seconds of the layer decide, plain expert parallelism included.

Shape letters: E experts, D devices, H selected experts of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.balanced.materialization_planner import (
    FEW_DEVICES,
    plan_materialization,
    quick_look,
)
from megatron_fssdp.planning.balanced.traffic_of_first import (
    DispatchOfFirst,
    dispatch_of_all,
    dispatch_of_first,
    transfer_of_first,
)
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import LayerPrice, LayerWork, counts_seconds, layer_seconds
from megatron_fssdp.planning.cost.layer_traffic import TransferTraffic, transfer_traffic
from megatron_fssdp.planning.memory.held_replicas import ReplicaLife
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer

LEAST_SAVING, LEAST_FURTHER_SAVING = 0.01, 0.001
"""Parts of plain expert parallelism's seconds that replicas must save together, and more replicas besides:
less is within what the model does not know."""

LEAST_CONSIDERED, CONSIDERED_OVER_HIDDEN = 16, 2
"""At most so many experts are considered, or so many times those whose transfers hide: more would cost the
host more than they save a device."""


@dataclass(frozen=True, eq=False)
class PlacementPricer:
    """Modelled seconds of one layer in an iteration under placements, by :func:`layer_seconds`.

    Tokens are split evenly among holders, without rounding. Balanced dispatch does not cost more.

    Attributes:
        load_DE: (token, k) pairs of an iteration by source and expert, ``[D, E]``.
        topology: Nodes of the devices.
        profile: Measured costs.
        rematerialize: Whether every micro-batch gathers twice and reduces once, instead of an iteration.
        hides: Whether transfers run beside compute.
    """

    load_DE: np.ndarray
    topology: Topology
    profile: LayerProfile
    rematerialize: bool = False
    hides: bool = True

    def seconds(self, placement: ExpertPlacement) -> float:
        """Seconds of the layer without the compute before it, which no placement changes."""
        dispatch = dispatch_of_all(self.load_DE, placement, self.topology)
        moved = transfer_traffic(two_level_transfer(placement, self.topology), self.topology)
        return float(self._price(dispatch, moved).moe_s[-1])

    def price_of_first(self, placement: ExpertPlacement, experts: Sequence[int] | np.ndarray) -> LayerPrice:
        """The price if only the first 0, 1, … H experts have their replicas; arrays [H+1].

        Args:
            placement: Owners and all replicas.
            experts: All replicated experts, in the order in which they get their replicas.
        """
        dispatch = dispatch_of_first(self.load_DE, placement, experts, self.topology)
        moved = transfer_of_first(two_level_transfer(placement, self.topology), experts, self.topology)
        return self._price(dispatch, moved)

    def _price(self, dispatch: DispatchOfFirst, moved: TransferTraffic) -> LayerPrice:
        return layer_seconds(
            LayerWork(dispatch.tokens_H, dispatch.busiest, gather=moved, replicas=moved),
            self.profile,
            ReplicaLife.LAYER_PASS if self.rematerialize else ReplicaLife.ITERATION,
            counts_s=self._counts_s,
            hides=self.hides,
        )

    @cached_property
    def _counts_s(self) -> float:
        return counts_seconds(self.profile, self.topology, self.load_DE.shape[1])


def replicated_experts(placement: ExpertPlacement) -> np.ndarray:
    """The experts with a replica, ascending, int64 [H]."""
    return np.flatnonzero(np.count_nonzero(placement.present_ED, axis=1) > 1)


def priced_materialization(
    owner_E: np.ndarray,
    load_DE: np.ndarray,
    topology: Topology,
    *,
    slots: int,
    profile: LayerProfile,
    rematerialize: bool = False,
    hides: bool = True,
) -> ExpertPlacement:
    """The cheapest of several placements by :class:`PlacementPricer`.

    A quick search plans for many experts. Of its result the replicas of the most loaded 0, 1, 2, …
    experts are compared; the fewest that cost the least are then planned anew, because a search that
    may replicate only so many places them otherwise.

    Args:
        owner_E: Owner of every expert, integers [E].
        load_DE: Expected load of an iteration by source and expert, [D, E].
        topology: Nodes of the devices.
        slots: Most replicas a device may hold, m.
        profile: Measured costs, the same numbers on all ranks.
        rematerialize: Whether replicas are gathered and reduced with every micro-batch.
        hides: Whether transfers run beside compute.

    Returns:
        A placement whose modelled seconds are at most the owners-only one's.
    """
    num_hidden = profile.overlap_degree(topology) if hides else 0
    considered = max(LEAST_CONSIDERED, CONSIDERED_OVER_HIDDEN * num_hidden)
    look = quick_look(owner_E, load_DE, topology, overlap_degree=considered, slots=slots)
    many = look.placement
    if not many.num_replicas:
        return many
    pricer = PlacementPricer(np.asarray(load_DE), topology, profile, rematerialize, hides)
    experts = replicated_experts(many)
    experts = experts[np.argsort(-pricer.load_DE.sum(axis=0)[experts], kind="stable")]
    seconds_H = pricer.price_of_first(many, experts).moe_s
    plain_s, least_s = seconds_H[0], seconds_H.min()
    if not least_s < (1 - LEAST_SAVING) * plain_s:
        return ExpertPlacement.owners_only(owner_E, topology.num_devices)
    number = 1 + int((seconds_H[1:] <= least_s + LEAST_FURTHER_SAVING * plain_s).argmax())
    if topology.num_devices <= FEW_DEVICES:
        again = plan_materialization(owner_E, load_DE, topology, overlap_degree=number, slots=slots)
    elif number >= look.least_degree:
        return many
    else:  # Further starts lower the price by 0.1 %, and take most of the time.
        again = quick_look(owner_E, load_DE, topology, overlap_degree=number, slots=slots).placement
    if pricer.seconds(again) < seconds_H[number]:
        return again
    return _of_experts(many, experts[:number])


def _of_experts(placement: ExpertPlacement, experts: np.ndarray) -> ExpertPlacement:
    """The owners, and the replicas of some experts only."""
    present_ED = np.zeros_like(placement.present_ED)
    present_ED[np.arange(placement.num_experts), placement.owner_E] = True
    present_ED[experts] = placement.present_ED[experts]
    return ExpertPlacement(placement.owner_E, present_ED, slots=placement.slots)
