"""One simulated iteration for Perfetto: every device's experts, and the lanes that all share."""

from pathlib import Path

from megatron_fssdp.reporting.chrome_trace import TraceSpan, write_chrome_trace
from megatron_fssdp.simulation.iteration_timeline import COMPUTE
from megatron_fssdp.simulation.simulator import StrategyOutcome

MOST_DEVICES = 64
"""More make a file that viewers open slowly."""


def simulation_spans(outcome: StrategyOutcome, iteration: int) -> list[TraceSpan]:
    """Spans of one iteration, by device.

    Each device's experts take as long as its own tokens; everything else is the same on all devices.

    Args:
        outcome: A simulated strategy.
        iteration: Index of the iteration.
    """
    num_devices = min(outcome.ledger.topology.num_devices, MOST_DEVICES)
    spans = []
    for lane, name, begin_s, end_s in outcome.layers.spans(iteration):
        shares = [1.0] * num_devices
        kind, _, number = name.rpartition(" ")
        if lane == COMPUTE and kind.startswith("experts"):
            shares = outcome.layers.expert_shares_D(iteration, int(number) - 1).tolist()[:num_devices]
        spans += [
            TraceSpan(device, lane, name, begin_s, begin_s + share * (end_s - begin_s))
            for device, share in enumerate(shares)
            if share > 0
        ]
    return spans


def write_simulation_trace(path: Path, outcome: StrategyOutcome, iteration: int) -> None:
    """Write :func:`simulation_spans` as a Chrome trace."""
    write_chrome_trace(path, simulation_spans(outcome, iteration))
