"""Reads what a run's log says about its memory and about the ends of its starts."""

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LOG_FILE = "log.txt"
STOP_MARK = "[fssdp] stopped after iteration"
"""Begin of the line that the command line writes when the ranks end before the run is complete."""

_ACCOUNTED = re.compile(rb"\[fssdp\] memory of a rank: ([^\r\n]+)")
_STOPPED = re.compile(re.escape(STOP_MARK).encode() + rb" ([^\r\n]+)")


class RunLog(NamedTuple):
    """Statements of a run's log.

    Attributes:
        accounted: The memory of experts. Empty if the log does not state it.
        stops: Every end of a start before the run was complete: ``5: interrupted by Ctrl-C``, with the number
            of the last complete iteration.
    """

    accounted: str = ""
    stops: tuple[str, ...] = ()


def read_log(record_dir: Path) -> RunLog:
    """Read the log of a run. A log that is missing or cannot be read states nothing."""
    accounted, stops = "", []
    with suppress(OSError), (record_dir / LOG_FILE).open("rb") as lines:
        for line in lines:
            # The last statement counts, because measured limits are known only after some iterations.
            if found := _ACCOUNTED.search(line):
                accounted = found[1].decode(errors="replace")
            elif found := _STOPPED.search(line):
                stops.append(found[1].decode(errors="replace"))
    return RunLog(accounted, tuple(stops))
