"""Reads and writes ``metrics.jsonl`` of a run: one line of metrics for each iteration."""

from dataclasses import asdict
from pathlib import Path

from megatron_fssdp.config.json_records import parse_record
from megatron_fssdp.records.json_lines import JsonLinesWriter, read_json_lines
from megatron_fssdp.records.metrics import IterationMetrics

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends one line for each iteration. A resumed run continues the file."""

    def __init__(self, record_dir: Path | str) -> None:
        self._lines = JsonLinesWriter(Path(record_dir) / METRICS_FILE)

    def append(self, metrics: IterationMetrics) -> None:
        """Write the line of one iteration. If that fails, the file is unchanged."""
        self._lines.append(asdict(metrics))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def parse_metrics_line(line: str) -> IterationMetrics:
    """Read one line. Unknown keys are ignored, and missing keys get their default values.

    Raises:
        ValueError: The line is not the record of an iteration.
    """
    return parse_record(IterationMetrics, line)


def read_metrics(record_dir: Path | str) -> list[IterationMetrics]:
    """Read ``metrics.jsonl`` of a run, in the order of iterations.

    A resumed run repeats the iterations after its checkpoint. Only the repetition counts.

    Raises:
        ConfigurationError: The file is missing or a line is damaged.
    """
    found: list[IterationMetrics] = []
    for record in read_json_lines(Path(record_dir) / METRICS_FILE, IterationMetrics):
        while found and found[-1].iteration >= record.iteration:
            found.pop()
        found.append(record)
    return found
