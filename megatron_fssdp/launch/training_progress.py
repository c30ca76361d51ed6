"""Shows the progress of a training run while it runs."""

import time
from collections import deque
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from megatron_fssdp.records.metrics import IterationMetrics
from megatron_fssdp.records.metrics_file import parse_metrics_line

_RECENT = 20
_PLAIN_INTERVAL_S = 10.0
_WIDE_COLUMNS = 1000
"""Width at which no word is shortened, for output that is not a terminal."""

_SPINNER_COLUMNS = 2


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
            try:
                records.append(parse_metrics_line(line))
            except ValueError:
                continue  # only the display misses this line; commands that read the file report it
        return records


def progress_text(
    record: IterationMetrics, iterations: int, recent_s: float, width: int = _WIDE_COLUMNS
) -> str:
    """Return one line of text about the last iteration of a run.

    ``recent_s`` is the mean duration of recent iterations, in seconds. Words are shortened if the text has
    more than ``width`` columns.
    """
    remaining_s = max(iterations - record.iteration, 0) * recent_s
    parts = [
        f"iteration {record.iteration}/{iterations}",
        f"loss {record.lm_loss:.4f}",
        f"{record.tokens_per_s:,.0f} tokens/s",
    ]
    if record.layers:
        used = sum(layer.load_max_over_mean for layer in record.layers) / len(record.layers)
        plain = sum(layer.ep_load_max_over_mean for layer in record.layers) / len(record.layers)
        parts.append(f"load max/mean {used:.2f} (plain EP {plain:.2f})")
    minutes, seconds = divmod(round(remaining_s), 60)
    text = "  ".join([*parts, f"ETA {minutes}:{seconds:02d}"])
    if len(text) <= width:
        return text
    for long, short in (("load max/mean", "load"), ("plain EP", "EP"), ("iteration ", "")):
        text = text.replace(long, short)
    return text


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
        self._saves = saves
        self._tail = MetricsTail(metrics)
        self._iterations = iterations
        self._console = console
        self._durations_s: deque[float] = deque(maxlen=_RECENT)
        self._waiting = f"starting {nproc} ranks"
        self._shown_s = time.monotonic()
        self._live: Live | None = None
        self.last: IterationMetrics | None = None
        self._printed: IterationMetrics | None = None

    @property
    def reached(self) -> int:
        """Number of the last recorded iteration; 0 if there is none."""
        return 0 if self.last is None else self.last.iteration

    def __enter__(self) -> "TrainingProgress":
        if self._console.is_terminal:
            spinner = Spinner("dots", text=self._waiting)
            self._live = Live(spinner, console=self._console, transient=True, refresh_per_second=8)
            self._live.start()
        else:
            self._console.print(self._waiting, highlight=False)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
        if self.last is not None:
            self._print()

    def update(self) -> None:
        """Show the newest iteration, if there is a new one."""
        records = self._tail.read()
        if not records:
            if self._saves and self.last is not None and self.last.iteration >= self._iterations:
                self._saves = False  # is said once
                if self._live is None:
                    self._print()
                    self._console.print("saving a checkpoint …", highlight=False)
                else:
                    self._live.update(Spinner("dots", text=f"{self._text()}  saving a checkpoint …"))
            return
        first = self.last is None
        self.last = records[-1]
        self._durations_s.extend(record.iteration_s for record in records)
        if self._live is not None:
            self._live.update(Spinner("dots", text=self._text()))
            return
        is_due = first or time.monotonic() - self._shown_s >= _PLAIN_INTERVAL_S
        if is_due and self.last.iteration < self._iterations:  # __exit__ shows the last iteration
            self._print()
            self._shown_s = time.monotonic()

    def _text(self) -> str:
        assert self.last is not None
        recent_s = sum(self._durations_s) / len(self._durations_s)
        on_terminal = self._live is not None and self._live.is_started
        width = self._console.width - _SPINNER_COLUMNS if on_terminal else _WIDE_COLUMNS
        return progress_text(self.last, self._iterations, recent_s, width)

    def _print(self) -> None:
        """Print the last iteration, once."""
        if self._printed is self.last:
            return
        self._printed = self.last
        self._console.print(self._text(), highlight=False, soft_wrap=True)
