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
    """Seconds of a layer's forward and backward pass; experts and collectives run one after the other.

    Attributes:
        communication_s: Seconds of the collectives. S2's all-to-all counts only with the seconds that it adds
            to the gather beside it.
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
        """Communication's share of the total seconds."""
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
        schedule: Name of the schedule: ``baseline``, ``megatron``, ``s1`` or ``s2``.
        layer: Sizes and parallelism of the layer.
        costs: Costs of all collectives of the schedule.
        flops_per_row: Floating-point operations of one row's forward pass through a part of an expert.
        flops_per_s: Throughput of a device on experts.
    """
    forward_s = rows_of_device(schedule, layer) * flops_per_row / flops_per_s
    return ScheduledSeconds(
        communication_s=NUM_PASSES * schedule_seconds(schedule, layer, costs),
        compute_s=(1 + BACKWARD_PER_FORWARD) * forward_s,
    )
