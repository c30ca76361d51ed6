"""Strategies that select replicas by measured costs, within a limit on the replicas of each device."""

from typing import Any

from megatron_fssdp.config.strategy.shipped_settings import SlotKeys
from megatron_fssdp.config.strategy.strategy_settings import profile_iterations
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.replica_life import ReplicaLife
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.strategy import Strategy


class MeasuredReplicas[Settings: SlotKeys](Strategy[Settings]):
    """Selects replicas by measured costs, in slots whose number is given or measured."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.profile_iterations, self.overlaps = profile_iterations(), settings.overlap

    def slots(self, context: LayerContext) -> int:
        """Largest number of replicas of a layer on a device.

        It is the given number, or else the number that fits into the measured free memory or, before the
        measurement, the number of experts that a device owns.
        """
        if self.settings.slots is not None:
            return self.settings.slots
        if context.profile is not None:
            return context.profile.memory_capacity
        return -(-context.num_experts // context.num_devices)

    def limits(self, context: LayerContext) -> str:
        """The largest number of replicas on a device and its origin, as a text for the log."""
        origin = "given" if self.settings.slots is not None else "measured"
        return f"slots m = {self.slots(context)} ({origin})"

    def plan_of(self, placement: ExpertPlacement, context: LayerContext, **more: Any) -> LayerPlan:
        """The plan with this placement, a two-level transfer, and more fields of :class:`LayerPlan`."""
        transfer = two_level_transfer(placement, context.topology)
        return LayerPlan(placement, transfer, gather_ahead=self.settings.overlap, **more)


class ReplicasAfterGate[Settings: SlotKeys](MeasuredReplicas[Settings]):
    """Selects the replicas of every micro-batch after the gate, from its exact counts."""

    replica_life = ReplicaLife.MICRO_BATCH

    def before_gate(self, context: LayerContext, history: LoadHistory) -> LayerPlan:
        """A plan without replicas, because the exact counts are not known before the gate."""
        return LayerPlan.owners_only(context, each_micro_batch=True)
