"""Reads and writes ``metrics.jsonl`` and ``evaluations.jsonl`` of a run.

Both have one line of JSON for each entry. A killed run loses at most the line that it was writing. Of what a
resumed run repeats, only the repetition counts.
"""

import os
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

from pydantic_core import to_json

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.files.json_records import parse_record
from megatron_fssdp.files.written_files import cannot_write
from megatron_fssdp.records.metrics import Evaluation, IterationMetrics

METRICS_FILE, EVALUATIONS_FILE = "metrics.jsonl", "evaluations.jsonl"


class MetricsWriter:
    """Appends one :class:`IterationMetrics` for each iteration. A resumed run continues the file.

    The first iteration that is appended drops its own lines and those of later iterations. If the file cannot
    be written, a ConfigurationError says so, also at once.
    """

    def __init__(self, record_dir: Path | str) -> None:
        self._path, self._has_begun = Path(record_dir) / METRICS_FILE, False
        _append_lines(self._path)

    def append(self, record: IterationMetrics) -> None:
        """Write an iteration as one line."""
        if not self._has_begun:
            with suppress(OSError):  # read_metrics ignores what is repeated, so the run goes on
                _drop_from(self._path, record.iteration)
        self._has_begun = True
        _append_lines(self._path, record)


def _drop_from(path: Path, iteration: int) -> None:
    """Cut the file before its first line of this iteration or of a later one."""
    kept = 0
    for line in path.read_bytes().splitlines(keepends=True):
        with suppress(ValueError):  # damaged lines stay; commands report them
            if parse_record(IterationMetrics, line).iteration >= iteration:
                os.truncate(path, kept)
                return
        kept += len(line)


def read_metrics(record_dir: Path | str) -> list[IterationMetrics]:
    """Read the metrics of a run in the order of iterations, or raise a ConfigurationError."""
    found: list[IterationMetrics] = []
    for record in _read_lines(Path(record_dir) / METRICS_FILE, IterationMetrics):
        while found and found[-1].iteration >= record.iteration:
            found.pop()
        found.append(record)
    return found


class MetricsTail:
    """Follows a ``metrics.jsonl`` to which a run appends, from its beginning or from its present end.

    Incomplete lines wait, damaged ones are left out. If a resumed run cuts the file, the tail begins again.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._line, self._end = b"", 0  # the last line that was read, and its end in the file
        if from_end:
            self.read()

    def read(self) -> list[IterationMetrics]:
        """Return the records since the last call."""
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
    """Add an evaluation to the file of a run, or raise a ConfigurationError."""
    _append_lines(record_dir / EVALUATIONS_FILE, evaluation)


def read_evaluations(record_dir: Path) -> tuple[Evaluation, ...]:
    """Read the evaluations of a run in the order of iterations, or raise a ConfigurationError.

    There are none if the run has no such file.
    """
    path = record_dir / EVALUATIONS_FILE
    found: dict[tuple[int, str], Evaluation] = {}
    for new in _read_lines(path, Evaluation) if path.exists() else ():
        found = {key: old for key, old in found.items() if key[0] <= new.iteration}
        found.pop((new.iteration, new.data), None)
        found[new.iteration, new.data] = new
    return tuple(found.values())


def _append_lines(path: Path, *records: Any) -> None:
    """Add dataclasses to a file, each as one line, after a half-written last line is cut."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            if end := file.tell():
                file.seek(end - 1)
                if file.read() != b"\n":
                    file.truncate(path.read_bytes().rfind(b"\n") + 1)
            # JSON has no NaN and no infinity, so these become null.
            file.writelines(to_json(record, inf_nan_mode="null") + b"\n" for record in records)
    except OSError as error:
        raise cannot_write(path, "record_dir", error) from None


def _read_lines[RecordT](path: Path, record_cls: type[RecordT]) -> list[RecordT]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse_record(record_cls, line))
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # the run was killed while it wrote this line, or is writing it now
            raise ConfigurationError(
                f"{path}: line {number} is damaged or incomplete ({error}); delete this line or record the "
                "run again"
            ) from None
    return records


def unreadable(path: Path, error: Exception) -> ConfigurationError:
    """Return the error to raise after that which reading a record raised."""
    if isinstance(error, FileNotFoundError):
        return ConfigurationError(f"{path}: no such file; give the folder of a run that recorded its loads")
    if isinstance(error, NotADirectoryError):
        return ConfigurationError(f"{path.parent}: is a file, wanted the folder of a run")
    if isinstance(error, PermissionError):
        return ConfigurationError(f"{path}: permission denied; let your user read it, or give another")
    reason = shorten(str(error) or type(error).__name__, 100, placeholder=" …")
    return ConfigurationError(
        f"{path}: damaged, incomplete or not a record of a run ({reason}); record the run again"
    )
