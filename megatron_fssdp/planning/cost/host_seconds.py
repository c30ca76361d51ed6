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
        "fssdp": (0.34, 1.6, 2.2, 2.9, 14, 100),
        "prophet": (0.88, 1.6, 2.9, 3.9, 15, 160),
        "auto": (0.63, 1.9, 2.6, 3.4, 15, 100),
    },
    after_gate_ms={
        "fssdp": (0.75, 1.4, 2.4, 2, 13, 98),
        "fastermoe": (0.12, 0.13, 0.16, 0.065, 0.5, 2.5),
        "quota": (0.25, 0.33, 0.49, 0.7, 2.3, 22),
        "auto": (0.75, 1.4, 2.4, 2, 13, 98),
    },
    dispatch_ms={
        "fssdp": (0.3, 0.42, 0.63, 0.61, 2.5, 22),
        "fastermoe": (0.3, 0.36, 0.51, 0.52, 2.1, 15),
        "quota": (0.25, 0.31, 0.43, 0.51, 1.9, 20),
        "auto": (0.3, 0.42, 0.63, 0.61, 2.5, 22),
    },
    correction_ms={"fssdp": (0.54, 0.99, 1.3, 1.5, 8.7, 60), "auto": (0.54, 0.99, 1.3, 1.5, 8.7, 60)},
)
