"""Seconds that the host of a rank takes to plan a layer, from a table of measurements.

``python -m benchmarks.host.host_table`` prints the tables at the end of this file. Between two sizes, the
logarithm of the seconds is interpolated along that of ``E * D``. Beyond the largest, the slope goes on.

Shape letters: E experts, D devices.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

SIZES = ((16, 8), (64, 32), (128, 64), (256, 64), (256, 256), (512, 1024))
"""Experts and devices at which seconds are measured."""


class HostWork(NamedTuple):
    """Seconds in which the host of a rank plans for one layer.

    It plans an iteration before the gate, and a micro-batch with its exact counts after the gate; then its
    own part of the micro-batch's dispatch. The device waits for the latter two.
    """

    before_gate_s: float = 0.0
    after_gate_s: float = 0.0
    dispatch_s: float = 0.0


class HostCosts(NamedTuple):
    """Milliseconds of :class:`HostWork` at each of :data:`SIZES`, by name of the strategy; otherwise 0."""

    before_gate_ms: Mapping[str, tuple[float, ...]] = {}
    after_gate_ms: Mapping[str, tuple[float, ...]] = {}
    dispatch_ms: Mapping[str, tuple[float, ...]] = {}

    def of_layer(self, strategy: str, num_experts: int, num_devices: int) -> HostWork:
        """Work for one layer under a strategy with its default settings."""
        sizes, size = np.log(np.prod(SIZES, axis=1)), np.log(num_experts * num_devices)

        def seconds(measured_ms: tuple[float, ...]) -> float:
            known = np.log(np.array(measured_ms) / 1e3)
            slope = (known[-1] - known[-2]) / (sizes[-1] - sizes[-2])
            beyond = slope * max(size - sizes[-1], 0.0)
            return float(np.exp(np.interp(size, sizes, known) + beyond))

        return HostWork(*(seconds(table[strategy]) if strategy in table else 0.0 for table in self))


MEASURED = HostCosts(
    before_gate_ms={
        "fssdp": (0.48, 2.4, 2.6, 3.4, 14, 110),
        "prophet": (1.6, 2.7, 4.5, 5.6, 19, 200),
        "auto": (0.89, 2.8, 3.2, 4.1, 16, 110),
    },
    after_gate_ms={
        "fssdp": (1.1, 2, 2.1, 2.8, 9.8, 73),
        "fastermoe": (0.19, 0.21, 0.085, 0.29, 0.54, 3.1),
        "quota": (0.41, 0.51, 0.76, 1.1, 3, 29),
        "auto": (1.1, 2, 2.1, 2.8, 9.8, 73),
    },
    dispatch_ms={
        "fssdp": (0.4, 0.49, 0.62, 0.76, 2.4, 24),
        "fastermoe": (0.47, 0.57, 0.53, 0.99, 2.4, 19),
        "quota": (0.4, 0.47, 0.54, 0.7, 2.3, 26),
        "auto": (0.4, 0.49, 0.62, 0.76, 2.4, 24),
    },
)
