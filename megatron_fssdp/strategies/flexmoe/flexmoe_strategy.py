"""FlexMoE: resident replicas that expand, shrink and migrate step by step (Hecate §2.3, §5.1).

A resident replica has optimizer states, so creating one costs a transfer of all of them.

Shape letters: D devices, E experts, N nodes.
"""

from collections.abc import Iterator
from functools import cache

import numpy as np

from megatron_fssdp.config.strategy.strategy_settings import profile_iterations
from megatron_fssdp.planning.cost.layer_seconds import moving_seconds
from megatron_fssdp.planning.dispatch.token_dispatch import plan_dispatch
from megatron_fssdp.planning.loads import LoadHistory, max_over_mean
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.flexmoe import FlexmoeSettings
from megatron_fssdp.strategies.layer_plan import LastResults, LayerContext, LayerPlan
from megatron_fssdp.strategies.plan_price import plan_price
from megatron_fssdp.strategies.strategy import ResidentReplicas

FLEXMOE_THRESHOLD = 1.1
"""Max/mean device load above which replicas are added or exchanged: below, steps save hardly anything."""

FLEXMOE_STEPS = 16
"""Most expansions, and most migrations, of a layer at a time; more are seldom needed at an interval."""

TRIED = 4
"""How many experts an expansion tries, and how many devices for each of them."""


class FlexmoeStrategy(ResidentReplicas[FlexmoeSettings]):
    """``flexmoe``: expands, shrinks and migrates resident replicas at an interval (Hecate §2.3, §5.1)."""

    def __init__(self, settings: FlexmoeSettings) -> None:
        super().__init__(settings)
        self.window, self.profile_iterations = settings.window, profile_iterations()
        self.overlaps, self.resident_slots = settings.overlap, settings.slots
        self._plans, self._placements = LastResults[LayerPlan](), LastResults[ExpertPlacement]()

    def slots(self, context: LayerContext) -> int:
        """Largest number of replicas of a layer on a device."""
        return self.resident_slots

    def replicates_at(self, iteration: int) -> bool:
        """Whether ``iteration`` is a multiple of ``placement_interval`` and not 0."""
        return iteration > 0 and iteration % self.settings.placement_interval == 0

    def replicate(self, context: LayerContext, load_DE: np.ndarray) -> ExpertPlacement:
        """The present placement, changed step by step, as long as a step saves seconds until the next turn.

        While the most loaded device has more than :data:`FLEXMOE_THRESHOLD` times the mean load, the expert
        with the highest load per replica expands to the least loaded device. If that device has none of its
        slots free, its replica with the lowest load shrinks first. Then replicas migrate to nodes that
        already hold their expert. There are at most :data:`FLEXMOE_STEPS` of either kind.
        """
        if context.profile is None or not load_DE.any():
            return context.placement
        same = context.placement, context.profile
        return self._placements.of(context.layer, same, load_DE, lambda: self._stepped(context, load_DE))

    def _stepped(self, context: LayerContext, load_DE: np.ndarray) -> ExpertPlacement:
        counts_DE, topology = np.rint(load_DE).astype(np.int64), context.topology
        placement, slots = context.placement, self.settings.slots

        @cache
        def layer_s(placement: ExpertPlacement) -> float:
            return plan_price(self._plan_of(placement, context), counts_DE, context).seconds

        def saves(before: ExpertPlacement, after: ExpertPlacement) -> bool:
            saved_s = self.settings.placement_interval * (layer_s(before) - layer_s(after))
            return saved_s > self.moving_s(context, before, after)

        for steps_of in (_expansions, _migrations):
            for _ in range(FLEXMOE_STEPS):
                steps = steps_of(placement, counts_DE, topology, slots)
                step = next((step for step in steps if saves(placement, step)), None)
                if step is None:
                    break
                placement = step
        return placement

    def moving_s(self, context: LayerContext, before: ExpertPlacement, after: ExpertPlacement) -> float:
        """Seconds in which owners send experts with their states to new replicas."""
        expert_P, device_P = np.nonzero(after.present_ED & ~before.present_ED)
        return moving_seconds(before.owner_E[expert_P], device_P, context.topology, context.costs)

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """A plan with the present resident replicas."""
        return self._plans.of(
            context.layer, (context,), context.owner_E, lambda: self._plan_of(context.placement, context)
        )

    def _plan_of(self, placement: ExpertPlacement, context: LayerContext) -> LayerPlan:
        if not placement.num_replicas:
            return LayerPlan.owners_only(context)
        return self.plan_of(placement, context, resident=True)


def _expansions(
    placement: ExpertPlacement, counts_DE: np.ndarray, topology: Topology, slots: int
) -> Iterator[ExpertPlacement]:
    """Placements with one more replica: the highest load per replica and the least loaded device first."""
    present_ED, owner_E = placement.present_ED, placement.owner_E
    load_D = plan_dispatch("even", counts_DE, placement, topology).device_tokens_D
    if max_over_mean(load_D) <= FLEXMOE_THRESHOLD:
        return
    devices = np.argsort(load_D, kind="stable")
    per_replica_E = counts_DE.sum(axis=0) / np.count_nonzero(present_ED, axis=1)
    for expert in np.argsort(-per_replica_E, kind="stable")[:TRIED].tolist():
        for device in devices[~present_ED[expert, devices]][:TRIED].tolist():
            grown_ED = present_ED.copy()
            grown_ED[expert, device] = True
            replicas = np.flatnonzero(present_ED[:, device] & (owner_E != device))
            if len(replicas) >= slots:
                grown_ED[replicas[np.argmin(per_replica_E[replicas])], device] = False
            yield ExpertPlacement(owner_E, grown_ED)


def _migrations(
    placement: ExpertPlacement, counts_DE: np.ndarray, topology: Topology, slots: int
) -> Iterator[ExpertPlacement]:
    """Placements in which a replica that is alone in its node moves, there or to a node with its expert."""
    node_D = topology.node_of_device_D
    room_D = slots - placement.replicas_per_device_D
    for expert in range(placement.num_experts):
        holders = placement.holders(expert)
        per_node_N = np.bincount(node_D[list(holders)], minlength=topology.num_nodes)
        for device in holders:
            if device == placement.owner_E[expert] or per_node_N[node_D[device]] > 1:
                continue
            for target in np.flatnonzero((room_D > 0) & ~placement.present_ED[expert]).tolist():
                if target != device and per_node_N[node_D[target]]:
                    moved_ED = placement.present_ED.copy()
                    moved_ED[expert, device], moved_ED[expert, target] = False, True
                    yield ExpertPlacement(placement.owner_E, moved_ED)
