"""Seconds of one MoE layer under one of Parm's schedules of tensor and expert tensor parallelism."""

from dataclasses import dataclass

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.planning.cost.tensor_schedules import (
    Schedule,
    ScheduleCosts,
    ScheduledLayer,
    rows_of_device,
    schedule_seconds,
)

NUM_PASSES = 2
"""Forward and backward.

The backward pass has the transposed collectives of the forward pass, of equal sizes.
"""


@dataclass(frozen=True)
class ScheduledSeconds:
    """Seconds of a layer's forward and backward pass, where collectives and experts never overlap.

    Attributes:
        communication_s: Seconds of the collectives. S2's all-to-all overlaps a gather. Only the time that it
            adds to this gather counts.
        compute_s: Seconds of the experts.
    """

    communication_s: float
    compute_s: float

    @property
    def total_s(self) -> float:
        """Seconds of communication and compute together."""
        return self.communication_s + self.compute_s

    @property
    def communication_share(self) -> float:
        """Share of communication in the total seconds, from 0 to 1."""
        return self.communication_s / self.total_s


def scheduled_seconds(
    schedule: Schedule,
    layer: ScheduledLayer,
    costs: ScheduleCosts,
    flops_per_row: float,
    flops_per_s: float,
) -> ScheduledSeconds:
    """Compute the seconds of a layer with even loads: Parm's Eq. 1, 11 and 14 in each pass, plus the experts.

    Args:
        schedule: Name of the schedule: ``baseline``, ``megatron``, ``s1`` or ``s2``.
        layer: Sizes and parallelism of the layer.
        costs: Costs of all collectives of the schedule.
        flops_per_row: Floating-point operations of the forward pass of one row in a device's part of an
            expert.
        flops_per_s: Throughput of a device on experts, in floating-point operations per second.
    """
    forward_s = rows_of_device(schedule, layer) * flops_per_row / flops_per_s
    return ScheduledSeconds(
        communication_s=NUM_PASSES * schedule_seconds(schedule, layer, costs),
        compute_s=(1 + BACKWARD_PER_FORWARD) * forward_s,
    )
