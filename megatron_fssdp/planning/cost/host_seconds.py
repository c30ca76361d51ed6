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
        "fssdp": (0.66, 1.5, 2.6, 3.4, 14, 140),
        "prophet": (0.89, 1.8, 3.5, 4.9, 30, 630),
        "auto": (0.95, 1.9, 4, 6.3, 37, 920),
    },
    after_gate_ms={
        "fssdp": (0.35, 0.7, 1.0, 1.2, 4.0, 36),
        "fastermoe": (0.059, 0.064, 0.022, 0.1, 0.26, 1.6),
        "quota": (0.25, 0.33, 0.55, 0.96, 4.4, 80),
    },
    dispatch_ms={
        "fssdp": (0.2, 0.25, 0.4, 0.7, 2.7, 28),
        "fastermoe": (0.057, 0.07, 0.1, 0.15, 0.4, 3),
        "quota": (0.18, 0.23, 0.4, 0.68, 2.7, 43),
    },
)
