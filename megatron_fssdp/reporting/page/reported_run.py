"""Everything that a run's folder has for its page."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.reporting.placement_records import (
    PLACEMENTS_FILE,
    RecordedPlacements,
    read_placements,
)
from megatron_fssdp.reporting.recorded_run import RecordedRun, distinct_names, read_run
from megatron_fssdp.reporting.run_records import LOADS_FILE, RecordedLoads, read_loads
from megatron_fssdp.reporting.strategy_colours import distinct_colours

_LOG_FILE = "log.txt"
_ACCOUNTED = re.compile(rb"\[fssdp\] memory of a rank: ([^\r\n]+)")


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """One run of a page.

    Attributes:
        name: What the page calls it.
        colour: Of its lines and bars.
        records: Its metrics.
        loads: Its router counts; ``None`` where there are none (yet).
        placements: Where its experts were; ``None`` where that was not recorded.
        accounted: What the log says of the memory of its experts; empty where it says nothing.
    """

    name: str
    colour: str
    records: RecordedRun
    loads: RecordedLoads | None = None
    placements: RecordedPlacements | None = None
    accounted: str = ""

    @property
    def num_iterations(self) -> int:
        """Recorded iterations."""
        return len(self.records.metrics)


def most_iterations(runs: Sequence[ReportedRun]) -> int:
    """Of any of the runs."""
    return max(run.num_iterations for run in runs)


def read_reported_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Read runs for one page.

    Args:
        paths: Their folders.

    Raises:
        ConfigurationError: One of them has no records, or damaged ones.
    """
    found = [read_run(path) for path in paths]
    colours = distinct_colours([run.strategy for run in found])
    return [
        ReportedRun(
            name,
            colour,
            run,
            read_loads(run.path) if (run.path / LOADS_FILE).exists() else None,
            read_placements(run.path) if (run.path / PLACEMENTS_FILE).exists() else None,
            _accounted_memory(run.path),
        )
        for run, name, colour in zip(found, distinct_names(*found), colours, strict=True)
    ]


def _accounted_memory(path: Path) -> str:
    accounted = b""
    with suppress(OSError), (path / _LOG_FILE).open("rb") as lines:
        for line in lines:
            # The last one counts: limits that are measured are known only after some iterations.
            if found := _ACCOUNTED.search(line):
                accounted = found[1]
    return accounted.decode("utf-8", errors="replace")
