"""FasterMoE's DDL-Roofline: how close MoE layers come to the limits of compute and communication (§3.3).

This module has Eq. 3 to 6. Eq. 1 is in ``layer_record.py``, and Eq. 2 is ``LinkSet.times``.
"""

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.cost.cost_model import BACKWARD_PER_FORWARD
from megatron_fssdp.simulation.moe_job import MoeJob
from megatron_fssdp.simulation.simulator import StrategyOutcome


@dataclass(frozen=True)
class RooflinePoint:
    """The MoE layers of an iteration under one strategy, on N devices.

    Raises:
        ValueError: The layers take no time or do not communicate.
    """

    compute_s: float  # of the experts on the slowest device of each layer, forward and backward
    communication_s: float  # of all communication, if nothing else runs at the same time
    end_to_end_s: float  # that the layers take in total
    total_flops: float  # floating-point operations of all experts on all devices, 12 α H² Σ B_w
    num_devices: int

    def __post_init__(self) -> None:
        for name in ("communication_s", "end_to_end_s"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name}: got {getattr(self, name)}, wanted more than 0 seconds; a roofline needs layers "
                    "that communicate, so give a run on at least two devices"
                )

    @property
    def ratio(self) -> float:
        """Seconds of computation divided by seconds of communication, ``R_CC`` (Eq. 3)."""
        return self.compute_s / self.communication_s

    @property
    def mean_flops_per_s(self) -> float:
        """Mean throughput of a device, ``P̄`` (Eq. 4), in floating-point operations per second."""
        return self.total_flops / (self.num_devices * self.end_to_end_s)


def ideal_flops_per_s[Ratio: (float, np.ndarray)](ratio: Ratio, peak_flops_per_s: float) -> Ratio:
    """The throughput if communication overlaps computation fully: ``P_w · min(1, R_CC)`` (Eq. 5)."""
    return peak_flops_per_s * np.minimum(1.0, ratio)


def semi_ideal_flops_per_s[Ratio: (float, np.ndarray)](ratio: Ratio, peak_flops_per_s: float) -> Ratio:
    """The throughput with even loads and no overlap: ``P_w · R_CC / (R_CC + 1)`` (Eq. 6)."""
    return peak_flops_per_s * ratio / (ratio + 1)


def roofline_point(outcome: StrategyOutcome, job: MoeJob) -> RooflinePoint:
    """A strategy's point: the mean of its MoE layers over iterations; a ValueError without communication.

    Communication is all-to-alls, counts, and what the compute outside the layers does not hide of spAG and
    spRS.
    """
    of_layers = ("experts", "all-to-all", "waiting for spAG", "waiting for spRS")
    experts_s, exchange_s, *waiting_s = (float(outcome.parts_s[part].mean()) for part in of_layers)
    alone_s = job.num_micro_batches * float(outcome.of_layers("exchange_s").sum(axis=1).mean())
    tokens = float(outcome.tokens_ILD.sum(axis=(1, 2)).mean())
    return RooflinePoint(
        compute_s=experts_s,
        communication_s=alone_s + sum(waiting_s),
        end_to_end_s=experts_s + exchange_s + sum(waiting_s),
        total_flops=(1 + BACKWARD_PER_FORWARD) * job.expert_flops_per_token * tokens,
        num_devices=job.num_devices,
    )
