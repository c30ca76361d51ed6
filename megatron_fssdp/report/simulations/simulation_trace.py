"""Writes one simulated iteration as a trace for Perfetto."""

from pathlib import Path

from megatron_fssdp.report.chrome_trace import TraceSpan, write_chrome_trace
from megatron_fssdp.simulation.lanes import COMPUTE
from megatron_fssdp.simulation.simulator import StrategyOutcome

MOST_DEVICES = 64
"""Maximum number of devices in a trace. Viewers open larger files slowly."""


def write_simulation_trace(path: Path, outcome: StrategyOutcome, iteration: int) -> None:
    """Write the time spans of one iteration on every device as a Chrome trace.

    The time of a device's experts depends on the device's own tokens. All other spans are the same on all
    devices.

    Args:
        path: File to write.
        outcome: Result of simulating a strategy.
        iteration: Index of the iteration, from 0.
    """
    num_devices = min(outcome.topology.num_devices, MOST_DEVICES)
    spans = []
    for lane, name, begin_s, end_s in outcome.spans(iteration):
        shares = [1.0] * num_devices
        kind, _, number = name.rpartition(" ")
        if lane == COMPUTE and kind.startswith("experts"):
            tokens_D = outcome.iterations[iteration].layers[int(number) - 1].tokens_D
            shares = (tokens_D[:num_devices] / max(int(tokens_D.max()), 1)).tolist()
        spans += [
            TraceSpan(device, lane, name, begin_s, begin_s + share * (end_s - begin_s))
            for device, share in enumerate(shares)
            if share > 0
        ]
    write_chrome_trace(path, spans)
