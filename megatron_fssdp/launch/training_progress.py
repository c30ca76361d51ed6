"""Shows the progress of a training run while it runs."""

import time
from collections import deque
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megatron_fssdp.records.metrics import IterationMetrics
from megatron_fssdp.records.metrics_file import MetricsTail

_RECENT = 20
_PLAIN_INTERVAL_S = 10.0


class TrainingProgress:
    """Shows the progress of a run: one live line on a terminal, or a line every 10 seconds elsewhere.

    Attributes:
        last: The newest record that the run appended to its metrics, or None.
    """

    def __init__(
        self, metrics: Path, iterations: int, nproc: int, console: Console, *, saves: bool = False
    ) -> None:
        """Follow the run's ``metrics.jsonl``; ``saves``: a checkpoint is written after the last iteration."""
        self._tail = MetricsTail(metrics, from_end=True)
        self._iterations, self._saves = iterations, saves
        self._console, self._start = console, f"starting {nproc} ranks"
        self._status = console.status(self._start)  # does nothing where there is no terminal
        self._durations_s: deque[float] = deque(maxlen=_RECENT)
        self._printed_s = 0.0
        self.last: IterationMetrics | None = None
        self._printed: IterationMetrics | None = None

    @property
    def reached(self) -> int:
        """Number of the last recorded iteration; 0 if there is none."""
        return 0 if self.last is None else self.last.iteration

    def __enter__(self) -> "TrainingProgress":
        self._status.start()
        if not self._console.is_terminal:
            self._console.print(self._start, highlight=False, soft_wrap=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._status.stop()
        self._saves = False
        self._print()

    def update(self) -> None:
        """Show the newest iteration, if there is a new one."""
        if records := self._tail.read():
            self.last = records[-1]
            self._durations_s.extend(record.iteration_s for record in records)
            self._status.update(Text(self._text(self.last), no_wrap=True, overflow="ellipsis"))
            is_due = time.monotonic() - self._printed_s >= _PLAIN_INTERVAL_S
            if not self._console.is_terminal and (is_due or self.last.iteration >= self._iterations):
                self._print()

    def _text(self, record: IterationMetrics) -> str:
        parts = [
            f"iteration {record.iteration}/{self._iterations}",
            f"loss {record.lm_loss:.4f}",
            f"{record.tokens_per_s:,.0f} tokens/s",
        ]
        if record.layers:
            used = sum(layer.load_max_over_mean for layer in record.layers) / len(record.layers)
            plain = sum(layer.ep_load_max_over_mean for layer in record.layers) / len(record.layers)
            parts.append(f"load max/mean {used:.2f} (plain EP {plain:.2f})")
        left_s = max(self._iterations - record.iteration, 0) * sum(self._durations_s) / len(self._durations_s)
        parts.append("ETA {}:{:02d}".format(*divmod(round(left_s), 60)))
        if self._saves and record.iteration >= self._iterations:
            parts.append("saving a checkpoint …")
        return "  ".join(parts)

    def _print(self) -> None:
        """Print the last iteration, once."""
        if self.last is not None and self._printed is not self.last:
            self._printed, self._printed_s = self.last, time.monotonic()
            self._console.print(self._text(self.last), highlight=False, soft_wrap=True)
