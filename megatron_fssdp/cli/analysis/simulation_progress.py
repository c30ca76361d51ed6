"""Shows how far a simulation is while it runs."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_fssdp.strategies.layer_plan import LayerPlan

_LIVE_INTERVAL_S = 0.2
_PLAIN_INTERVAL_S = 10.0


class SimulationProgress:
    """A live bar on a terminal, or a line every 10 seconds elsewhere, and none if a simulation is short.

    The bar counts strategies: the simulated iterations of a strategy are one step, and the search for the
    values at which it pays is another one.
    """

    def __init__(
        self, console: Console, num_iterations: int, num_strategies: int, *, searches: bool = False
    ) -> None:
        self._console, self._num_iterations, self._num_strategies = console, num_iterations, num_strategies
        self._strategy, self._num_begun = "", 0
        self._num_searched: int | None = None
        self._num_plans = 0
        self._shown_s = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("simulating", total=num_strategies * (2 if searches else 1))

    def __enter__(self) -> "SimulationProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, strategy: str) -> None:
        """Begin to simulate the next strategy."""
        self._strategy = strategy
        self._num_begun += 1

    def planned(self, iteration: int, layer: int, plan: LayerPlan) -> None:
        """Show how far the strategy is. The simulator calls this after every plan."""
        if self._num_searched is not None:
            self._num_plans += 1
            what = f"searching where it pays ({self._num_plans:,} layers planned)"
            self._show(self._num_begun + self._num_searched - 1, what)
            return
        share = iteration / self._num_iterations
        self._show(self._num_begun - 1 + share, f"iteration {iteration + 1}/{self._num_iterations}")

    def search(self, strategy: str) -> None:
        """Begin to search the values at which a strategy starts to pay. All strategies are simulated."""
        self._strategy = strategy
        self._num_searched, self._num_plans = (self._num_searched or 0) + 1, 0

    def _show(self, num_done: float, what: str) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s < (_PLAIN_INTERVAL_S if self._bar is None else _LIVE_INTERVAL_S):
            return
        self._shown_s = now_s
        number = self._num_searched or self._num_begun
        text = f"{self._strategy} ({number} of {self._num_strategies} strategies): {what}"
        if self._bar is not None:
            self._bar.update(self._task, completed=num_done, description=text)
        else:
            self._console.print(text, highlight=False)
