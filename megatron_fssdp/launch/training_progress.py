"""Shows the progress of a training run while it runs."""

import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megatron_fssdp.config.json_records import parse_record
from megatron_fssdp.records.metrics import IterationMetrics

_RECENT = 20
_PLAIN_INTERVAL_S = 10.0


class MetricsTail:
    """Reads the lines that a run appends to ``metrics.jsonl``, complete lines only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def read(self) -> list[IterationMetrics]:
        """Return the records that were added since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            # A resumed run cuts off a half-written line before it appends.
            self._position = min(self._position, file.seek(0, 2))
            file.seek(self._position)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._position += len(whole)
        records = []
        for line in whole.decode("utf-8", errors="replace").splitlines():
            with suppress(
                ValueError
            ):  # only the display misses this line; commands that read the file report it
                records.append(parse_record(IterationMetrics, line))
        return records


def progress_text(record: IterationMetrics, iterations: int, recent_s: float) -> str:
    """Return one line about an iteration; ``recent_s`` is the mean duration of recent ones, in seconds."""
    parts = [
        f"iteration {record.iteration}/{iterations}",
        f"loss {record.lm_loss:.4f}",
        f"{record.tokens_per_s:,.0f} tokens/s",
    ]
    if record.layers:
        used = sum(layer.load_max_over_mean for layer in record.layers) / len(record.layers)
        plain = sum(layer.ep_load_max_over_mean for layer in record.layers) / len(record.layers)
        parts.append(f"load max/mean {used:.2f} (plain EP {plain:.2f})")
    minutes, seconds = divmod(round(max(iterations - record.iteration, 0) * recent_s), 60)
    return "  ".join([*parts, f"ETA {minutes}:{seconds:02d}"])


class TrainingProgress:
    """Shows the progress of a run: one live line on a terminal, or a line every 10 seconds elsewhere."""

    def __init__(
        self, metrics: Path, iterations: int, nproc: int, console: Console, *, saves: bool = False
    ) -> None:
        """Prepare the display.

        Args:
            metrics: Path of the run's ``metrics.jsonl``.
            iterations: Number of iterations of the run.
            nproc: Number of ranks, which the text names while they start.
            console: Console that shows the progress.
            saves: Whether the run writes a checkpoint after its last iteration.
        """
        self._tail, self._iterations, self._saves = MetricsTail(metrics), iterations, saves
        self._console, self._status = console, console.status(f"starting {nproc} ranks")
        self._durations_s: deque[float] = deque(maxlen=_RECENT)
        self._shown_s = time.monotonic()
        self.last: IterationMetrics | None = None
        self._printed: IterationMetrics | None = None

    @property
    def reached(self) -> int:
        """Number of the last recorded iteration; 0 if there is none."""
        return 0 if self.last is None else self.last.iteration

    def __enter__(self) -> "TrainingProgress":
        if self._console.is_terminal:
            self._status.start()
        else:
            self._console.print(str(self._status.status), highlight=False)
        return self

    def __exit__(self, *exception: object) -> None:
        self._status.stop()
        self._print()

    def update(self) -> None:
        """Show the newest iteration, if there is a new one."""
        records = self._tail.read()
        if not records:
            if self._saves and self.last is not None and self.last.iteration >= self._iterations:
                self._saves = False  # is said once
                self._show("saving a checkpoint …")
            return
        is_first = self.last is None
        self.last = records[-1]
        self._durations_s.extend(record.iteration_s for record in records)
        is_due = is_first or time.monotonic() - self._shown_s >= _PLAIN_INTERVAL_S
        if self._console.is_terminal:
            self._show(self._text())
        elif is_due and self.last.iteration < self._iterations:  # __exit__ shows the last iteration
            self._print()
            self._shown_s = time.monotonic()

    def _show(self, text: str) -> None:
        if self._console.is_terminal:
            self._status.update(Text(text, no_wrap=True, overflow="ellipsis"))
        else:
            self._print()
            self._console.print(text, highlight=False)

    def _text(self) -> str:
        assert self.last is not None
        return progress_text(self.last, self._iterations, sum(self._durations_s) / len(self._durations_s))

    def _print(self) -> None:
        """Print the last iteration, once."""
        if self.last is not None and self._printed is not self.last:
            self._printed = self.last
            self._console.print(self._text(), highlight=False, soft_wrap=True)
