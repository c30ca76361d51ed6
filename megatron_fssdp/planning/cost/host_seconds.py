"""Seconds that the host of a rank takes to plan a layer, from a table of measurements.

``python -m benchmarks.host.host_table`` prints the tables at the end of this file. Between two sizes, the
logarithm of the seconds is interpolated along that of ``E * D``. Beyond the largest, the slope goes on.

Shape letters: E experts, D devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

SIZES = ((16, 8), (64, 32), (256, 64), (256, 256), (512, 1024))
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
        "fssdp": (0.84, 1.9, 8.6, 39, 890),
        "prophet": (0.35, 0.44, 0.5, 1.9, 16),
        "auto": (1.1, 2.1, 9.6, 43, 940),
    },
    after_gate_ms={
        "fastermoe": (0.065, 0.07, 0.094, 0.18, 1),
        "quota": (0.18, 0.2, 0.33, 0.7, 6),
    },
    dispatch_ms={
        "fastermoe": (0.077, 0.087, 0.13, 0.23, 1.1),
        "quota": (0.053, 0.061, 0.12, 0.24, 1.5),
    },
)
