"""Reads and writes ``metrics.jsonl`` and ``evaluations.jsonl`` of a run.

Both have one line of JSON for each entry. A resumed run repeats what came after its checkpoint, and only the
repetition counts.
"""

import os
from contextlib import suppress
from pathlib import Path

from megatron_fssdp.config.json_records import parse_record
from megatron_fssdp.records.json_lines import append_lines, read_json_lines
from megatron_fssdp.records.metrics import Evaluation, IterationMetrics

METRICS_FILE, EVALUATIONS_FILE = "metrics.jsonl", "evaluations.jsonl"


class MetricsWriter:
    """Appends one :class:`IterationMetrics` for each iteration. A resumed run continues the file.

    The first iteration that is appended drops its own lines and those of later iterations, so that each
    iteration has one line. A ConfigurationError says, also at once, that the file cannot be written.
    """

    def __init__(self, record_dir: Path | str) -> None:
        self._path, self._has_begun = Path(record_dir) / METRICS_FILE, False
        append_lines(self._path)

    def append(self, record: IterationMetrics) -> None:
        """Write an iteration as one line."""
        if not self._has_begun:
            with suppress(OSError):  # read_metrics ignores what is repeated, so the run goes on
                _drop_from(self._path, record.iteration)
        self._has_begun = True
        append_lines(self._path, record)


def _drop_from(path: Path, iteration: int) -> None:
    """Cut a file of metrics before its first line of this iteration or of a later one."""
    kept = 0
    for line in path.read_bytes().splitlines(keepends=True):
        with suppress(ValueError):  # damaged lines stay; commands report them
            if parse_record(IterationMetrics, line).iteration >= iteration:
                os.truncate(path, kept)
                return
        kept += len(line)


def read_metrics(record_dir: Path | str) -> list[IterationMetrics]:
    """Read the metrics of a run, in the order of iterations.

    Unknown keys are ignored, and missing keys get their default values.

    Raises:
        ConfigurationError: The file is missing or a line is damaged.
    """
    found: list[IterationMetrics] = []
    for record in read_json_lines(Path(record_dir) / METRICS_FILE, IterationMetrics):
        while found and found[-1].iteration >= record.iteration:
            found.pop()
        found.append(record)
    return found


class MetricsTail:
    """Follows a ``metrics.jsonl`` to which a run appends, from its beginning or from its present end.

    Only complete lines count. A damaged line is left out; commands that read the whole file report it. If a
    resumed run cuts the file, the tail begins again with the first line.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._line, self._end = b"", 0  # the last line that was read, and its end in the file
        if from_end:
            self.read()

    def read(self) -> list[IterationMetrics]:
        """Return the records that were added since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._end - len(self._line))
            if file.read(len(self._line)) != self._line:
                self._line, self._end = b"", file.seek(0)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._end += len(whole)
        self._line = whole[whole.rfind(b"\n", 0, -1) + 1 :] or self._line
        records = []
        for line in whole.splitlines():
            with suppress(ValueError):
                records.append(parse_record(IterationMetrics, line))
        return records


def append_evaluation(record_dir: Path, evaluation: Evaluation) -> None:
    """Add an evaluation to the file of a run, or raise a ConfigurationError if it cannot be written."""
    append_lines(record_dir / EVALUATIONS_FILE, evaluation)


def read_evaluations(record_dir: Path) -> tuple[Evaluation, ...]:
    """Read the evaluations of a run in the order of iterations; none if the run has no such file.

    Raises:
        ConfigurationError: The file cannot be read, or a line is damaged.
    """
    path = record_dir / EVALUATIONS_FILE
    found: dict[tuple[int, str], Evaluation] = {}
    for new in read_json_lines(path, Evaluation) if path.exists() else ():
        found = {key: old for key, old in found.items() if key[0] <= new.iteration}
        found.pop((new.iteration, new.data), None)
        found[new.iteration, new.data] = new
    return tuple(found.values())
