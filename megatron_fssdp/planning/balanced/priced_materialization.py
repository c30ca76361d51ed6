"""Selects how many experts to replicate by the modelled seconds of the layer.

This planner is ours and goes beyond the papers. Hecate (§4.2) replicates as many experts as can be
transferred during the compute before the layer. But one more expert may save more seconds than its transfer
exposes, and one expert less may cost nothing. So this planner compares the modelled seconds of the layer,
also those of plain expert parallelism.

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
"""Smallest savings, as parts of the seconds of plain expert parallelism.

The first is for all replicas together. The second is for more replicas in place of fewer. Smaller savings are
within the error of the model.
"""

LEAST_CONSIDERED, CONSIDERED_OVER_HIDDEN = 16, 2
"""Limits of the number of experts that the planner considers for replication. The larger limit counts.

The first is a number of experts. The second is a multiple of the number of experts whose transfers are
hidden. More experts would cost the host more time than they save on the devices.
"""


@dataclass(frozen=True, eq=False)
class PlacementPricer:
    """Computes the modelled seconds of one layer in an iteration under placements, by :func:`layer_seconds`.

    The price assumes that tokens are split evenly among holders, without rounding to whole tokens. Balanced
    dispatch does not cost more.

    Attributes:
        load_DE: (token, k) pairs of an iteration by source device and expert, ``[D, E]``.
        topology: Nodes of the devices.
        profile: Measured costs of the layer and the links.
        rematerialize: Whether every micro-batch gathers replicas twice and reduces their gradients once.
            Otherwise an iteration gathers and reduces once.
        hides: Whether transfers run beside compute.
    """

    load_DE: np.ndarray
    topology: Topology
    profile: LayerProfile
    rematerialize: bool = False
    hides: bool = True

    def seconds(self, placement: ExpertPlacement) -> float:
        """Seconds of the layer under a placement. The compute before the layer is not included."""
        dispatch = dispatch_of_all(self.load_DE, placement, self.topology)
        moved = transfer_traffic(two_level_transfer(placement, self.topology), self.topology)
        return float(self._price(dispatch, moved).moe_s[-1])

    def price_of_first(self, placement: ExpertPlacement, experts: Sequence[int] | np.ndarray) -> LayerPrice:
        """The prices if only the first 0, 1, … H experts have their replicas.

        Args:
            placement: Owners and all replicas.
            experts: All replicated experts, in the order in which they get their replicas; ``[H]``.

        Returns:
            A price whose fields are arrays ``[H+1]``.
        """
        dispatch = dispatch_of_first(self.load_DE, placement, experts, self.topology)
        moved = transfer_of_first(two_level_transfer(placement, self.topology), experts, self.topology)
        return self._price(dispatch, moved)

    def _price(self, dispatch: DispatchOfFirst, moved: TransferTraffic) -> LayerPrice:
        """Price of the layer from the traffic of its dispatch and of its transfers."""
        return layer_seconds(
            LayerWork(dispatch.tokens_H, dispatch.busiest, gather=moved, replicas=moved),
            self.profile,
            ReplicaLife.LAYER_PASS if self.rematerialize else ReplicaLife.ITERATION,
            counts_s=self._counts_s,
            hides=self.hides,
        )

    @cached_property
    def _counts_s(self) -> float:
        """Seconds to gather the router counts of a micro-batch."""
        return counts_seconds(self.profile, self.topology, self.load_DE.shape[1])


def replicated_experts(placement: ExpertPlacement) -> np.ndarray:
    """The experts that have replicas, ascending, int64 ``[H]``."""
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
    """Plan the placement with the fewest modelled seconds of several candidates (:class:`PlacementPricer`).

    A quick search plans replicas for many experts. Its result is priced with the replicas of only the most
    loaded 0, 1, 2, … experts. The smallest of these numbers with about the lowest price is selected. With
    this number as the overlap degree, a second search plans again, because it may place fewer experts better.
    The cheaper of the two placements is the result. It has no replicas if they would save less than
    :data:`LEAST_SAVING`.

    Args:
        owner_E: Owner of every expert, integers ``[E]``.
        load_DE: Expected (token, k) pairs of an iteration by source device and expert, ``[D, E]``.
        topology: Nodes of the devices.
        slots: Most replicas that a device may hold, m.
        profile: Measured costs of the layer and the links, the same numbers on all ranks.
        rematerialize: Whether replicas are gathered and reduced with every micro-batch.
        hides: Whether transfers run beside compute.

    Returns:
        A placement whose modelled seconds are at most those without replicas.
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
    else:  # More starts would lower the price by only 0.1 % and take most of the planning time.
        again = quick_look(owner_E, load_DE, topology, overlap_degree=number, slots=slots).placement
    if pricer.seconds(again) < seconds_H[number]:
        return again
    return _of_experts(many, experts[:number])


def _of_experts(placement: ExpertPlacement, experts: np.ndarray) -> ExpertPlacement:
    """A placement with the same owners and only the replicas of the given experts, int64 ``[H]``."""
    present_ED = np.zeros_like(placement.present_ED)
    present_ED[np.arange(placement.num_experts), placement.owner_E] = True
    present_ED[experts] = placement.present_ED[experts]
    return ExpertPlacement(placement.owner_E, present_ED, slots=placement.slots)
