"""Reads what a run's log says about its memory and about the ends of its starts."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOG_FILE = "log.txt"
STOP_MARK = "[fssdp] stopped after iteration"
"""Begin of the line that the command line writes when the ranks end before the run is complete."""

_ACCOUNTED = re.compile(rb"\[fssdp\] memory of a rank: ([^\r\n]+)")
_STOPPED = re.compile(re.escape(STOP_MARK).encode() + rb" ([^\r\n]+)")


@dataclass(frozen=True)
class RunLog:
    """Statements of a run's log.

    Attributes:
        accounted: The memory of experts. Empty if the log does not state it.
        stops: Every end of a start before the run was complete: ``5: interrupted by Ctrl-C``, with the number
            of the last complete iteration.
    """

    accounted: str = ""
    stops: tuple[str, ...] = ()


def read_log(record_dir: Path) -> RunLog:
    """Read the log of a run. A log that is missing or cannot be read states nothing.

    Args:
        record_dir: Folder of the run.
    """
    accounted, stops = b"", []
    with suppress(OSError), (record_dir / LOG_FILE).open("rb") as lines:
        for line in lines:
            # The last statement counts, because measured limits are known only after some iterations.
            if found := _ACCOUNTED.search(line):
                accounted = found[1]
            elif found := _STOPPED.search(line):
                stops.append(found[1])
    return RunLog(_text(accounted), tuple(map(_text, stops)))


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")
