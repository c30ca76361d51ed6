"""Times what ``fssdp`` plans for one layer in an iteration, while the loads drift.

Run: ``python -m benchmarks.fssdp_planning``. It prints CPU milliseconds of one process: mean, median and 90th
percentile. Logarithms of popularities take a random step in every iteration,
tokens are multinomial, and every device has 2 slots. Costs are those of ``planner_time.py``.

Shape letters: E experts, D devices.
"""

import argparse
import time

import numpy as np

from benchmarks.planner_time import DEVICES_PER_NODE, LOAD_SIGMA, PROFILE, TOKENS_PER_DEVICE, owners
from megatron_fssdp.config.strategy.shipped_settings import FssdpSettings
from megatron_fssdp.planning.loads import LoadHistory
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.fssdp import FssdpStrategy
from megatron_fssdp.strategies.layer_plan import LayerContext

SIZES = [(16, 8), (64, 32), (256, 64)]
DRIFTS = (0.0, 0.005, 0.05)
"""Standard deviations of a step of a popularity's logarithm."""
WARM_UP = 10
"""Iterations before the measured ones, which fill the history."""


def measure(num_experts: int, num_devices: int, drift: float, iterations: int) -> None:
    """Print one row."""
    rng = np.random.default_rng(0)
    log_E = LOAD_SIGMA * rng.normal(size=num_experts)
    topology = Topology.uniform(num_devices, max(num_devices // DEVICES_PER_NODE, 1))
    context = LayerContext(1, owners(num_experts, num_devices), topology, PROFILE)
    strategy = FssdpStrategy(FssdpSettings(slots=2))
    history = LoadHistory(strategy.window, num_devices, num_experts)
    taken_ms = []
    for iteration in range(WARM_UP + iterations):
        log_E += drift * rng.normal(size=num_experts)
        popularity_E = np.exp(log_E) / np.exp(log_E).sum()
        counts_DE = rng.multinomial(TOKENS_PER_DEVICE, popularity_E, size=num_devices)
        begin = time.process_time()
        strategy.before_gate(context, history)
        end = time.process_time()
        history.append(counts_DE)
        if iteration >= WARM_UP:
            taken_ms.append(1e3 * (end - begin))
    median, p90 = np.percentile(taken_ms, [50, 90])
    times = f"mean {np.mean(taken_ms):.2f}, median {median:.2f}, 90 % {p90:.2f} ms"
    print(f"E={num_experts:<4} D={num_devices:<4} drift {drift:<6} {times}", flush=True)


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=200)
    given = parser.parse_args()
    for num_experts, num_devices in SIZES:
        for drift in DRIFTS:
            measure(num_experts, num_devices, drift, given.iterations)


if __name__ == "__main__":
    main()
