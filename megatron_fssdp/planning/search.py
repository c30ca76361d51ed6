"""Plans one layer's replicas by one search for the fewest modelled seconds.

This planner is ours. Hecate (§4.2, Alg. 1) replicates by load as many experts as can be transferred during
the compute before the layer. But one more expert may save more seconds than its transfer exposes, and where a
replica goes decides which links carry tokens.

The search, ``kernels/placement_search.py``, compares all placements by one price, ``layer_seconds.py``:

1. **Seeds.** Owners only. Devices, or nodes, get the one or two experts to which they send most. Water
   filling: owners give load away until they keep a part of the mean load, at six levels; with several nodes
   again so that each of these experts is in all nodes. The most loaded experts everywhere, as FasterMoE
   places them. A placement of the caller.
2. **A climb** from owners only, by a smooth price, in which all devices count, the highest ones most. It is
   repeated while 1, 2, 4, … experts on each link cost nothing.
3. **Descents** from the best placement so far, by the exact price, the smooth one and the exact one again. A
   step takes an expert with a large part of the busiest device or link. It adds a replica; or, if this saves
   nothing, it drops one, puts one into every node (by the smooth price, it also tries this for experts that
   have none) or everywhere, or, by the exact price, swaps one with the least useful replica of a full device.
   Then **kicks**: all replicas of one expert change at once, and a descent follows.
4. Replicas without which the placement costs no more are dropped.

An expert is taken out once for all its moves, and a price adds what it does to the highest values without it.
Trials in which one device computes too much are left out.
The search stops after a number of prices, not seconds, so all ranks find the same placement. A quick one has
neither the climb nor kicks, and its descents begin with the smooth one.

Shape letters: D devices, E experts, N nodes.
"""

from functools import cached_property

import numpy as np

from megatron_fssdp.planning.compiled_form import kernel
from megatron_fssdp.planning.cost.deduplicated_traffic import tokens_per_pair
from megatron_fssdp.planning.cost.layer_costs import CostedLayer, LayerCosts
from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import layer_costs
from megatron_fssdp.planning.cost.link_seconds import gather_counts_s
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife

LEAST_SAVING = 0.01
"""Smallest saving of all replicas, as a part of a layer's seconds: the error of the model."""

PRICES_PER_SIZE = 12
"""Most prices of a descent, over experts and devices together; it bounds the time of unusual layers."""

TRANSFER_OVER_LOAD = 5e-4
"""Cost of an expert on a link, over the mean device load: without it, replicas that hardly help stayed."""


class LayerSearch(CostedLayer):
    """One layer, and the search for its replicas."""

    def seconds(self, placement: ExpertPlacement) -> float:
        """Seconds of the layer under a placement, as the search counts them."""
        layer = kernel("priced_layer").PricedLayer(self, placement, 0)
        return float(layer.start_s)

    @cached_property
    def plain(self) -> ExpertPlacement:
        """The placement without replicas."""
        return ExpertPlacement.owners_only(self.owner_E, self.topology.num_devices)

    @cached_property
    def plain_s(self) -> float:
        """Seconds of the layer without replicas."""
        return self.seconds(self.plain)

    def best_placement(
        self,
        *,
        slots: int,
        most_replicated: int | None = None,
        start: ExpertPlacement | None = None,
        is_quick: bool = False,
    ) -> tuple[ExpertPlacement, float]:
        """The placement that the search finds, and its seconds.

        A device has at most ``slots`` replicas (m), and ``most_replicated`` experts, by default all, have
        some (t); or none, if they would save less than :data:`LEAST_SAVING`. ``start`` is one more seed, or a
        ValueError beyond these limits. If it ``is_quick``, it takes half of the time, and finds 1 or 2 %
        less.
        """
        plain = self.plain
        most_replicated = len(self.owner_E) if most_replicated is None else most_replicated
        if not slots or not most_replicated or not self.load_DE.any():
            return plain, self.plain_s
        # The kernel would write beyond its arrays.
        if start is not None and (
            start.replicas_per_device_D.max() > slots or not np.array_equal(start.owner_E, self.owner_E)
        ):
            raise ValueError(f"start: wanted the layer's owners, and at most {slots} replicas on a device")
        plain_s, best_s, present_ED = kernel("placement_search").search_replicas(
            self,
            (start or plain).present_ED,
            slots,
            most_replicated,
            PRICES_PER_SIZE * sum(self.load_DE.shape),
            is_quick,
        )
        self.__dict__["plain_s"] = plain_s  # of which a search knows the price
        if best_s > (1 - LEAST_SAVING) * plain_s:
            return plain, plain_s
        return ExpertPlacement(self.owner_E, present_ED.astype(np.bool_)), best_s


def plan_materialization(
    owner_E: np.ndarray, load_DE: np.ndarray, topology: Topology, *, overlap_degree: int, slots: int
) -> ExpertPlacement:
    """Plan the placement with the lowest highest device load that the search finds, without measured costs.

    Transfers of ``overlap_degree`` experts (t) count as hidden. Loads ``[D, E]`` are in any unit, and a
    device has at most ``slots`` replicas (m).
    """
    owner = ExpertPlacement.owners_only(owner_E, topology.num_devices).owner_E
    load, wanted = np.asarray(load_DE, np.float64), (topology.num_devices, len(owner))
    if load.shape != wanted:
        raise ValueError(f"load_DE has shape {load.shape}: wanted {wanted}, by source device and expert")
    # Only the highest device load counts, and a little each transfer.
    expert = TRANSFER_OVER_LOAD * float(load.sum()) / topology.num_devices
    moves, of_hops = np.array([[0.0, expert, expert]] * 3), np.zeros((_most_hops(topology) + 1, 12))
    costs = LayerCosts(
        *(np.zeros((3, 2)), np.zeros((3, 2)), moves, of_hops),
        per_token_s=1.0,
        num_micro_batches=1,
        counts_s=0.0,
        hidden_s=0.0,
        hidden_back_s=0.0,
        life=ReplicaLife.ITERATION,
        in_turn=False,
        early=0.0,
    )
    layer = LayerSearch(owner, load, topology, costs)
    return layer.best_placement(slots=slots, most_replicated=overlap_degree)[0]


def layer_search(
    owner_E: np.ndarray,
    load_DE: np.ndarray,
    topology: Topology,
    profile: LayerProfile,
    *,
    life: ReplicaLife,
    hides: bool,
) -> LayerSearch:
    """One layer with measured costs and the life of replicas; loads are those of an iteration, ``[D, E]``.

    ``hides``: transfers run beside compute.
    """
    num_experts, choices, units = len(owner_E), profile.sent_choices, (1.0, 1.0, 1.0)
    if choices is not None:
        # Relays divide a node's tokens by their sources, not by the holders of hot experts.
        units = (*tokens_per_pair(topology, num_experts, choices), 0.0)
    costs = layer_costs(
        profile,
        life,
        gather_counts_s(profile.links, topology, num_experts),
        _most_hops(topology),
        num_micro_batches=profile.num_micro_batches,
        hides=hides,
        units_per_pair=units,
    )
    return LayerSearch(owner_E, np.asarray(load_DE, np.float64), topology, costs)


def _most_hops(topology: Topology) -> int:
    """Most hops of a path: one for each other node, and in a node the depth of a tree over its devices."""
    return topology.num_nodes + topology.num_devices.bit_length()
