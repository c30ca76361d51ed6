"""Seconds that the host of a rank takes to plan a layer, from a table of measurements.

``python -m benchmarks.host_table`` asks every strategy at several sizes, as the runtime does, and prints the
tables at the end of this file. Between two sizes, the logarithm of the seconds is interpolated along the
logarithm of ``E * D``, because kernels go through tables of experts and devices. Beyond the largest size, the
slope of the last two sizes goes on. Below the smallest size, the seconds are those of the smallest size.

Shape letters: E experts, D devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

SIZES = ((16, 8), (64, 32), (256, 64), (256, 256), (512, 1024))
"""Experts and devices at which seconds are measured."""


@dataclass(frozen=True)
class HostWork:
    """What the host of a rank does for one layer, in seconds.

    Attributes:
        before_gate_s: Plan of an iteration. On a GPU, the host makes it while it would wait for the device.
        after_gate_s: Plan with the exact counts of a micro-batch. The device waits for it.
        dispatch_s: A rank's own part of a micro-batch's dispatch, for which the device waits.
    """

    before_gate_s: float = 0.0
    after_gate_s: float = 0.0
    dispatch_s: float = 0.0


@dataclass(frozen=True)
class HostCosts:
    """Measured milliseconds at each of :data:`SIZES`, by name of the strategy.

    A strategy that is not named costs nothing.

    Attributes:
        before_gate_ms: An iteration's plan.
        after_gate_ms: A plan with exact counts.
        dispatch_ms: A rank's part of the dispatch.
    """

    before_gate_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    after_gate_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    dispatch_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def of_layer(self, strategy: str, num_experts: int, num_devices: int) -> HostWork:
        """Work for one layer under a strategy with its default settings.

        Args:
            strategy: Name of the strategy.
            num_experts: Number of experts, E.
            num_devices: Number of devices, D.
        """
        return HostWork(
            *(
                _interpolated_s(table[strategy], num_experts * num_devices) if strategy in table else 0.0
                for table in (self.before_gate_ms, self.after_gate_ms, self.dispatch_ms)
            )
        )


def _interpolated_s(measured_ms: tuple[float, ...], num_pairs: int) -> float:
    """Seconds at a number of pairs of expert and device, from milliseconds at each of :data:`SIZES`."""
    sizes = np.log([num_experts * num_devices for num_experts, num_devices in SIZES])
    known, size = np.log(np.array(measured_ms) / 1e3), float(np.log(num_pairs))
    if size > sizes[-1]:
        slope = (known[-1] - known[-2]) / (sizes[-1] - sizes[-2])
        return float(np.exp(known[-1] + slope * (size - sizes[-1])))
    return float(np.exp(np.interp(size, sizes, known)))


MEASURED = HostCosts(
    before_gate_ms={
        "ep": (0.052, 0.061, 0.062, 0.091, 0.22),
        "fssdp": (0.82, 2.9, 12, 52, 1.1e03),
        "prophet": (0.97, 1.7, 4, 15, 3.6e02),
        "fastermoe": (0.042, 0.044, 0.056, 0.094, 0.23),
        "quota": (0.046, 0.069, 0.067, 0.14, 0.32),
        "smartmoe": (0.06, 0.05, 0.056, 0.077, 0.29),
        "flexmoe": (0.052, 0.06, 0.072, 0.099, 0.32),
        "parm": (0.043, 0.08, 0.058, 0.068, 0.3),
        "auto": (1.3, 1.8, 13, 52, 1.1e03),
    },
    after_gate_ms={
        "fssdp": (0.13, 0.28, 0.4, 0.9, 7.8),
        "fastermoe": (0.071, 0.077, 0.11, 0.21, 1.3),
        "quota": (0.22, 0.35, 0.58, 2.7, 40),
        "auto": (0.0037, 0.0058, 0.37, 0.83, 9.1),
    },
    dispatch_ms={
        "ep": (0.086, 0.092, 0.15, 0.25, 0.94),
        "fssdp": (0.11, 0.16, 0.24, 0.37, 1.2),
        "prophet": (0.077, 0.12, 0.21, 0.74, 1.1),
        "fastermoe": (0.075, 0.088, 0.14, 0.31, 1.2),
        "quota": (0.062, 0.1, 0.23, 0.84, 6.9),
        "smartmoe": (0.12, 0.093, 0.14, 0.21, 1),
        "flexmoe": (0.074, 0.087, 0.13, 0.23, 0.94),
        "parm": (0.075, 0.12, 0.13, 0.2, 1.1),
        "auto": (0.09, 0.12, 0.25, 0.36, 1.2),
    },
)
