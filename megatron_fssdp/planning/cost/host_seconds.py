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
    own part of the micro-batch's dispatch. Or it corrects the iteration's plan after its first gate. The
    device waits for all but the first.
    """

    before_gate_s: float = 0.0
    after_gate_s: float = 0.0
    dispatch_s: float = 0.0
    correction_s: float = 0.0


class HostCosts(NamedTuple):
    """Milliseconds of :class:`HostWork` at each of :data:`SIZES`, by name of the strategy; otherwise 0."""

    before_gate_ms: Mapping[str, tuple[float, ...]] = {}
    after_gate_ms: Mapping[str, tuple[float, ...]] = {}
    dispatch_ms: Mapping[str, tuple[float, ...]] = {}
    correction_ms: Mapping[str, tuple[float, ...]] = {}

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
        "fssdp": (0.39, 1.7, 2.3, 3, 15, 95),
        "prophet": (0.9, 1.6, 2.9, 3.9, 15, 160),
        "auto": (0.71, 2.2, 2.4, 3.2, 14, 110),
    },
    after_gate_ms={
        "fssdp": (1.1, 2, 3.1, 3.1, 15, 100),
        "fastermoe": (0.12, 0.13, 0.052, 0.065, 0.44, 2.5),
        "quota": (0.25, 0.31, 0.5, 0.71, 2.3, 23),
        "auto": (1.1, 2, 3.1, 3.1, 15, 100),
    },
    dispatch_ms={
        "fssdp": (0.41, 0.54, 0.83, 0.91, 3.1, 24),
        "fastermoe": (0.3, 0.36, 0.34, 0.52, 2, 15),
        "quota": (0.25, 0.31, 0.42, 0.51, 1.9, 20),
        "auto": (0.41, 0.54, 0.83, 0.91, 3.1, 24),
    },
    correction_ms={
        "fssdp": (0.68, 1.4, 1.6, 1.6, 7.4, 74),
        "auto": (0.68, 1.4, 1.6, 1.6, 7.4, 74),
    },
)
