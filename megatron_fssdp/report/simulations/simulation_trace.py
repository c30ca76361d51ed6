"""Writes one simulated iteration as a Chrome trace, which Perfetto shows."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fssdp.simulation.lanes import COMPUTE
from megatron_fssdp.simulation.simulator import StrategyOutcome

MOST_DEVICES = 64
"""Maximum number of devices in a trace. Viewers open larger files slowly."""


def write_simulation_trace(path: Path, outcome: StrategyOutcome, iteration: int) -> None:
    """Write the time spans of one iteration: a process for each device, with a row for each lane.

    The time of a device's experts depends on the device's own tokens. All other spans are the same on all
    devices.

    Args:
        path: File to write.
        outcome: Result of simulating a strategy.
        iteration: Index of the iteration, from 0.
    """
    num_devices = min(outcome.topology.num_devices, MOST_DEVICES)
    spans = outcome.spans(iteration)
    begin_s = min(begin_s for _, _, begin_s, _ in spans)
    lanes = list(dict.fromkeys(lane for lane, *_ in spans))
    names = [("process_name", 0, "rank {}"), *(("thread_name", *one) for one in enumerate(lanes))]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": kind, "pid": device, "tid": row, "args": {"name": name.format(device)}}
        for device in range(num_devices)
        for kind, row, name in names
    ]
    for lane, name, from_s, to_s in spans:
        share_D = np.ones(num_devices)
        kind, _, number = name.rpartition(" ")
        if lane == COMPUTE and kind.startswith("experts"):
            tokens_D = outcome.iterations[iteration].layers[int(number) - 1].tokens_D
            share_D = tokens_D[:num_devices] / max(int(tokens_D.max()), 1)
        for device in np.flatnonzero(share_D).tolist():
            span_us = {"ts": 1e6 * (from_s - begin_s), "dur": 1e6 * share_D[device] * (to_s - from_s)}
            events.append({"ph": "X", "name": name, "pid": device, "tid": lanes.index(lane), **span_us})
    trace = {"displayTimeUnit": "ms", "traceEvents": events}
    path.write_text(json.dumps(trace) + "\n", encoding="utf-8")
