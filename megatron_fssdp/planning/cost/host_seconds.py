"""Seconds that the host of a rank takes to plan a layer, from a table of measurements.

``python -m benchmarks.host.host_table`` prints the tables at the end of this file. Between two sizes, the
logarithm of the seconds is interpolated along that of ``E * D``. Beyond the largest, the slope goes on.

Shape letters: E experts, D devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

SIZES = ((16, 8), (64, 32), (128, 64), (256, 64), (256, 256), (512, 1024))
"""Experts and devices at which seconds are measured."""


@dataclass(frozen=True)
class HostWork:
    """Seconds in which the host of a rank plans for one layer.

    It plans an iteration before the gate, and a micro-batch with its exact counts after the gate; then its
    own part of the micro-batch's dispatch. The device waits for the latter two.
    """

    before_gate_s: float = 0.0
    after_gate_s: float = 0.0
    dispatch_s: float = 0.0


@dataclass(frozen=True)
class HostCosts:
    """Milliseconds of :class:`HostWork` at each of :data:`SIZES`, by name of the strategy; otherwise 0."""

    before_gate_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    after_gate_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    dispatch_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def of_layer(self, strategy: str, num_experts: int, num_devices: int) -> HostWork:
        """Work for one layer under a strategy with its default settings."""
        sizes, size = np.log(np.prod(SIZES, axis=1)), np.log(num_experts * num_devices)

        def seconds(measured_ms: tuple[float, ...]) -> float:
            known = np.log(np.array(measured_ms) / 1e3)
            slope = (known[-1] - known[-2]) / (sizes[-1] - sizes[-2])
            beyond = slope * max(size - sizes[-1], 0.0)
            return float(np.exp(np.interp(size, sizes, known) + beyond))

        tables = (self.before_gate_ms, self.after_gate_ms, self.dispatch_ms)
        return HostWork(*(seconds(table[strategy]) if strategy in table else 0.0 for table in tables))


MEASURED = HostCosts(
    before_gate_ms={
        "fssdp": (0.64, 1.6, 3.6, 6.2, 37, 910),
        "prophet": (0.93, 1.9, 3.6, 5, 30, 620),
        "auto": (1, 2.6, 4.1, 6.7, 38, 940),
    },
    after_gate_ms={
        "fastermoe": (0.059, 0.067, 0.022, 0.1, 0.26, 1.6),
        "quota": (0.26, 0.32, 0.54, 0.85, 4.6, 80),
    },
    dispatch_ms={
        "fastermoe": (0.057, 0.074, 0.11, 0.15, 0.41, 2.9),
        "quota": (0.18, 0.23, 0.38, 0.66, 2.8, 44),
    },
)
