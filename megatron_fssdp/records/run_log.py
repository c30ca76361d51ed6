"""Reads what a run's log says about its memory and about the ends of its starts."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LOG_FILE = "log.txt"
_MEMORY_MARK = "[fssdp] memory of a rank: "
STOP_MARK = "[fssdp] stopped after iteration"
"""Begin of the line that the command line writes when the ranks end before the run is complete."""


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
    with suppress(OSError), (record_dir / LOG_FILE).open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            # The last statement counts, because measured limits are known only after some iterations.
            _, stated, words = line.partition(_MEMORY_MARK)
            accounted = words.strip() if stated else accounted
            _, stopped, words = line.partition(STOP_MARK)
            stops += [words.strip()] if stopped else []
    return RunLog(accounted, tuple(stops))
