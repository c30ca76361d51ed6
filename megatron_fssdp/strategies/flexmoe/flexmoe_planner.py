"""FlexMoE: resident replicas that expand, shrink and migrate step by step (Hecate §2.3, §5.1).

A resident replica has optimizer states, so creating one costs a transfer of all of them.

Shape letters: E experts, D devices, N nodes.
"""

from collections.abc import Callable, Iterator

import numpy as np

from megatron_fssdp.planning.dispatch.token_dispatch import plan_dispatch
from megatron_fssdp.planning.loads import max_over_mean
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology

TRIED = 4
"""How many experts an expansion tries, and how many devices for each of them."""


def next_resident_placement(
    placement: ExpertPlacement,
    counts_DE: np.ndarray,
    topology: Topology,
    saving_s: Callable[[ExpertPlacement, ExpertPlacement], float],
    *,
    slots: int,
    threshold: float,
    most_steps: int,
) -> ExpertPlacement:
    """Change the resident replicas step by step, as long as a step saves seconds; owners stay.

    While the most loaded device has more than ``threshold`` times the mean load, the expert with the highest
    load per replica expands to the least loaded device. If that device has none of its ``slots`` free, its
    replica with the lowest load shrinks first. Then replicas migrate to nodes that already hold their expert.
    There are at most ``most_steps`` of either kind. ``saving_s`` are the seconds that a step from one
    placement to another saves while it is kept; counts are those of an iteration.
    """
    for steps_of in (
        lambda present: _expansions(present, counts_DE, topology, threshold, slots),
        lambda present: _migrations(present, topology, slots),
    ):
        for _ in range(most_steps):
            step = next((step for step in steps_of(placement) if saving_s(placement, step) > 0), None)
            if step is None:
                break
            placement = step
    return placement


def _expansions(
    placement: ExpertPlacement, counts_DE: np.ndarray, topology: Topology, threshold: float, slots: int
) -> Iterator[ExpertPlacement]:
    """Placements with one more replica: the highest load per replica and the least loaded device first."""
    present_ED, owner_E = placement.present_ED, placement.owner_E
    load_D = plan_dispatch("even", counts_DE, placement, topology).device_tokens_D
    if max_over_mean(load_D) <= threshold:
        return
    devices = np.argsort(load_D, kind="stable")
    each_E = counts_DE.sum(axis=0) / np.count_nonzero(present_ED, axis=1)
    for expert in np.argsort(-each_E, kind="stable")[:TRIED].tolist():
        for device in devices[~present_ED[expert, devices]][:TRIED].tolist():
            grown_ED = present_ED.copy()
            grown_ED[expert, device] = True
            replicas = np.flatnonzero(present_ED[:, device] & (owner_E != device))
            if len(replicas) >= slots:
                grown_ED[replicas[np.argmin(each_E[replicas])], device] = False
            yield ExpertPlacement(owner_E, grown_ED)


def _migrations(placement: ExpertPlacement, topology: Topology, slots: int) -> Iterator[ExpertPlacement]:
    """Placements in which a replica that is alone in its node moves, there or to a node with its expert."""
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
                    yield ExpertPlacement(placement.owner_E, moved_ED)
