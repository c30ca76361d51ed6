"""Reads all records of a run that its page shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.reporting.colours import distinct_colours
from megatron_fssdp.reporting.records.arrays.load_records import RecordedLoads, has_loads, read_loads
from megatron_fssdp.reporting.records.arrays.placement_records import (
    RecordedPlacements,
    has_placements,
    read_placements,
)
from megatron_fssdp.reporting.records.recorded_run import RecordedRun, distinct_names, read_run
from megatron_fssdp.reporting.records.run_log import read_log

TRACES = "torch_profile/rank-*.json.gz"
"""Traces of torch's profiler, in Megatron's place for them."""


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """All records of one run on a page.

    Attributes:
        name: Name of the run on the page.
        colour: Colour of the run's lines and bars.
        records: Metrics of the run.
        loads: Router counts of the run, or None if they are not written yet or were not recorded.
        placements: Placements of the run's experts, or None if they were not recorded.
        accounted: The log's statement on the memory of experts. Empty if the log has none.
        traces: Paths of the traces that torch's profiler wrote, relative to the run's folder.
        stops: Ends of starts before the run was complete, as the log states them (``RunLog.stops``).
    """

    name: str
    colour: str
    records: RecordedRun
    loads: RecordedLoads | None = None
    placements: RecordedPlacements | None = None
    accounted: str = ""
    stops: tuple[str, ...] = ()
    traces: tuple[str, ...] = ()

    @property
    def num_iterations(self) -> int:
        """Number of recorded iterations."""
        return len(self.records.metrics)


def most_iterations(runs: Sequence[ReportedRun]) -> int:
    """Return the number of iterations of the longest run."""
    return max(run.num_iterations for run in runs)


def read_reported_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Read the records of several runs for one page.

    Args:
        paths: Folders of the runs.

    Raises:
        ConfigurationError: A folder has no records, or damaged records.
    """
    found = [read_run(path) for path in paths]
    colours = distinct_colours([run.strategy for run in found])
    return [
        ReportedRun(
            name,
            colour,
            run,
            read_loads(run.path) if has_loads(run.path) else None,
            read_placements(run.path) if has_placements(run.path) else None,
            log.accounted,
            log.stops,
            tuple(str(one.relative_to(run.path)) for one in sorted(run.path.glob(TRACES))),
        )
        for run, name, colour in zip(found, distinct_names(*found), colours, strict=True)
        for log in (read_log(run.path),)
    ]
