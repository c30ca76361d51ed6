"""FasterMoE's DDL-Roofline: how near MoE layers come to what compute and communication allow (§3.3).

Eq. 1 is ``layer_seconds.expert_seconds`` and Eq. 2 ``LinkSet.times``; Eq. 3 to 6 are here.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RooflinePoint:
    """The MoE layers of an iteration under one strategy.

    Attributes:
        compute_s: Seconds of the experts, forward and backward, of the slowest device in each layer.
        communication_s: Seconds of everything that is exchanged, as if nothing ran beside it.
        end_to_end_s: Seconds that the layers take.
        total_flops: Of all experts on all devices, ``12 α H² Σ B_w``.
        num_devices: N.
    """

    compute_s: float
    communication_s: float
    end_to_end_s: float
    total_flops: float
    num_devices: int

    def __post_init__(self) -> None:
        for name in ("communication_s", "end_to_end_s"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: wanted more than 0 seconds; a roofline needs "
                    "layers that communicate, so at least two devices"
                )

    @property
    def ratio(self) -> float:
        """Computation over communication, ``R_CC`` (Eq. 3)."""
        return self.compute_s / self.communication_s

    @property
    def mean_flops_per_s(self) -> float:
        """Throughput of a device on average, ``P̄`` (Eq. 4)."""
        return self.total_flops / (self.num_devices * self.end_to_end_s)


def ideal_flops_per_s[Ratio: (float, np.ndarray)](ratio: Ratio, peak_flops_per_s: float) -> Ratio:
    """Throughput where communication and computation run together: ``P_w · min(1, R_CC)`` (Eq. 5).

    Args:
        ratio: ``R_CC``, or an array of them.
        peak_flops_per_s: ``P_w``, of one device.
    """
    return peak_flops_per_s * np.minimum(1.0, ratio)


def semi_ideal_flops_per_s[Ratio: (float, np.ndarray)](ratio: Ratio, peak_flops_per_s: float) -> Ratio:
    """Throughput where one follows the other on even loads: ``P_w · R_CC / (R_CC + 1)`` (Eq. 6).

    Args:
        ratio: ``R_CC``, or an array of them.
        peak_flops_per_s: ``P_w``, of one device.
    """
    return peak_flops_per_s * ratio / (ratio + 1)
