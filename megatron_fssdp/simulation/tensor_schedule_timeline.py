"""Seconds of one MoE layer under a schedule of tensor and expert tensor parallelism (Parm), both passes."""

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
"""A backward pass has the transposes of the forward pass's collectives, of the same sizes."""


@dataclass(frozen=True)
class ScheduledSeconds:
    """A layer's forward and backward pass; its experts wait for its collectives, and they for it.

    Attributes:
        communication_s: Collectives. S2's all-to-all counts with what it adds to the gather beside it.
        compute_s: Experts.
    """

    communication_s: float
    compute_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.communication_s + self.compute_s

    @property
    def communication_share(self) -> float:
        """Communication's part of all."""
        return self.communication_s / self.total_s


def scheduled_seconds(
    schedule: Schedule,
    layer: ScheduledLayer,
    costs: ScheduleCosts,
    flops_per_row: float,
    flops_per_s: float,
) -> ScheduledSeconds:
    """Seconds of a layer with even loads: Parm's Eq. 1, 11 and 14 in each pass, and the experts.

    Args:
        schedule: Which order.
        layer: What it is about.
        costs: Of all collectives of the schedule.
        flops_per_row: Forward of one row by a device's part of an expert.
        flops_per_s: A device's throughput on experts.
    """
    forward_s = rows_of_device(schedule, layer) * flops_per_row / flops_per_s
    return ScheduledSeconds(
        communication_s=NUM_PASSES * schedule_seconds(schedule, layer, costs),
        compute_s=(1 + BACKWARD_PER_FORWARD) * forward_s,
    )
