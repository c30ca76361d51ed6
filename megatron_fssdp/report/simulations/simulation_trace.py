"""Writes one simulated iteration as a Chrome trace, which Perfetto shows."""

import json
from pathlib import Path
from typing import Any

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
    spans = sorted(outcome.spans(iteration), key=lambda span: (span[2], -span[3]))
    lanes = list(dict.fromkeys(lane for lane, *_ in spans))
    events: list[dict[str, Any]] = []
    for device in range(num_devices):
        names = [("process_name", 0, f"rank {device}"), *(("thread_name", *one) for one in enumerate(lanes))]
        events += [
            {"ph": "M", "name": kind, "pid": device, "tid": row, "args": {"name": name}}
            for kind, row, name in names
        ]
    for lane, name, begin_s, end_s in spans:
        shares = [1.0] * num_devices
        kind, _, number = name.rpartition(" ")
        if lane == COMPUTE and kind.startswith("experts"):
            tokens_D = outcome.iterations[iteration].layers[int(number) - 1].tokens_D
            shares = (tokens_D[:num_devices] / max(int(tokens_D.max()), 1)).tolist()
        for device, share in enumerate(shares):
            if share > 0:
                times = {
                    "ts": round(1e6 * (begin_s - spans[0][2]), 3),
                    "dur": round(1e6 * share * (end_s - begin_s), 3),
                }
                events.append({"ph": "X", "name": name, "pid": device, "tid": lanes.index(lane), **times})
    trace = {"displayTimeUnit": "ms", "traceEvents": events}
    path.write_text(json.dumps(trace) + "\n", encoding="utf-8")
