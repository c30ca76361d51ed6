"""FlexMoE: resident replicas that expand, shrink and migrate step by step (Hecate §2.3, §5.1).

A resident replica outlives iterations and has optimizer states, so creating one costs a transfer of all of
them. Owners never move; a checkpoint holds only the owners' experts.

Shape letters: E experts, D devices, N nodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.cost.layer_profile import LayerProfile
from megatron_fssdp.planning.cost.layer_seconds import moving_seconds, placement_seconds
from megatron_fssdp.planning.dispatch.token_dispatch import plan_dispatch
from megatron_fssdp.planning.loads import max_over_mean
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.planning.replica_life import ReplicaLife


@dataclass(frozen=True, eq=False)
class ReplicaPrice:
    """Modelled seconds of a layer with resident replicas.

    Attributes:
        counts_DE: (token, k) pairs of an iteration by source device and expert, integers ``[D, E]``.
        topology: Nodes of the devices.
        profile: Measured costs of the layer and of the links.
        num_iterations: Iterations for which a placement is kept.
        weighs_moves: Whether the seconds of a move count against what it saves.
    """

    counts_DE: np.ndarray
    topology: Topology
    profile: LayerProfile
    num_iterations: int
    weighs_moves: bool = True

    def iteration_s(self, placement: ExpertPlacement) -> float:
        """Seconds of an iteration: all-to-alls, experts, and what is exposed of the gradients' all-reduce."""
        life = ReplicaLife.RESIDENT
        return float(placement_seconds(self.counts_DE, placement, self.topology, self.profile, life).moe_s)

    def move_s(self, before: ExpertPlacement, after: ExpertPlacement) -> float:
        """Seconds in which owners send parameters, masters and optimizer states to new replicas."""
        expert_P, device_P = np.nonzero(after.present_ED & ~before.present_ED)
        return moving_seconds(before.owner_E[expert_P], device_P, self.topology, self.profile)

    def saving_s(self, before: ExpertPlacement, after: ExpertPlacement) -> float:
        """Seconds that a placement saves while it is kept, minus those of its move if moves are weighed."""
        saved_s = self.iteration_s(before) - self.iteration_s(after)
        return self.num_iterations * saved_s - (self.move_s(before, after) if self.weighs_moves else 0.0)


def next_resident_placement(
    placement: ExpertPlacement, price: ReplicaPrice, *, slots: int, threshold: float, most_steps: int
) -> ExpertPlacement:
    """Change the resident replicas step by step, as long as a step saves seconds.

    While the most loaded device has more than ``threshold`` times the mean load, the expert with the highest
    load per replica expands to the least loaded device. If that device has no free slot, its replica with the
    lowest load shrinks first. Then replicas migrate to nodes that already hold their expert. A step is taken
    if it saves seconds by :meth:`ReplicaPrice.saving_s`.

    Args:
        placement: The present placement.
        price: Modelled seconds of placements and moves.
        slots: Most replicas that a device may hold of the layer.
        threshold: Maximum over mean device load up to which no replica expands.
        most_steps: Most expansions, and most migrations.

    Returns:
        A placement with the same owners; ``placement`` itself if nothing pays.
    """
    for steps_of in (
        lambda present: _expansions(present, price, threshold, slots),
        lambda present: _migrations(present, price.topology, slots),
    ):
        for _ in range(most_steps):
            steps = steps_of(placement)
            step = next((step for step in steps if price.saving_s(placement, step) > 0), None)
            if step is None:
                break
            placement = step
    return placement


TRIED = 4
"""How many experts an expansion tries, and how many devices for each of them."""


def _expansions(
    placement: ExpertPlacement, price: ReplicaPrice, threshold: float, slots: int
) -> Iterator[ExpertPlacement]:
    """Placements with one more replica: the highest load per replica and the least loaded device first.

    If the device of the new replica has no free slot, its replica with the lowest load is removed. There are
    none if the maximum over the mean of the device loads is at most ``threshold``.
    """
    present_ED, owner_E = placement.present_ED, placement.owner_E
    load_D = plan_dispatch("even", price.counts_DE, placement, price.topology).device_tokens_D
    if max_over_mean(load_D) <= threshold:
        return
    devices = np.argsort(load_D, kind="stable")
    each_E = price.counts_DE.sum(axis=0) / np.count_nonzero(present_ED, axis=1)
    for expert in np.argsort(-each_E, kind="stable")[:TRIED].tolist():
        for device in devices[~present_ED[expert, devices]][:TRIED].tolist():
            grown_ED = present_ED.copy()
            grown_ED[expert, device] = True
            replicas = np.flatnonzero(present_ED[:, device] & (owner_E != device))
            if len(replicas) >= slots:
                if not slots:
                    continue
                grown_ED[replicas[np.argmin(each_E[replicas])], device] = False
            yield ExpertPlacement(owner_E, grown_ED, slots=slots)


def _migrations(placement: ExpertPlacement, topology: Topology, slots: int) -> Iterator[ExpertPlacement]:
    """Placements in which one replica has moved to another device, in a node that already holds its expert.

    A replica moves only if it is the only holder in its node. Its own node also counts as one that holds the
    expert. A device may hold ``slots`` replicas.
    """
    node_D = topology.node_of_device_D
    room_D = slots - placement.replicas_per_device_D
    for expert in range(placement.num_experts):
        holders = placement.holders(expert)
        per_node_N = np.bincount(node_D[list(holders)], minlength=topology.num_nodes)
        for device in holders:
            if device == placement.owner_E[expert] or per_node_N[node_D[device]] > 1:
                continue
            for other in np.flatnonzero((room_D > 0) & ~placement.present_ED[expert]).tolist():
                if other != device and per_node_N[node_D[other]]:
                    moved_ED = placement.present_ED.copy()
                    moved_ED[expert, device], moved_ED[expert, other] = False, True
                    yield ExpertPlacement(placement.owner_E, moved_ED, slots=slots)
