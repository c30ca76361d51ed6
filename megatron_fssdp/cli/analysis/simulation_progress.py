"""Shows how far a simulation is while it runs."""

import time

from rich.console import Console

from megatron_fssdp.strategies.layer_plan import LayerPlan

_LIVE_INTERVAL_S, _PLAIN_INTERVAL_S = 0.2, 10.0


class SimulationProgress:
    """A live line on a terminal, or a line every 10 seconds elsewhere, and none if a simulation is short."""

    def __init__(self, console: Console, num_iterations: int, num_strategies: int) -> None:
        self._console, self._num_iterations, self._num_strategies = console, num_iterations, num_strategies
        self._status = console.status("simulating")
        self._number, self._strategy = 0, ""
        self._num_searched: int | None = None  # layers that were planned in the search
        self._shown_s = time.monotonic()

    def __enter__(self) -> "SimulationProgress":
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def begin(self, strategy: str, number: int, *, searches: bool = False) -> None:
        """Begin to simulate a strategy, or to search the values at which it starts to pay."""
        self._strategy, self._number, self._num_searched = strategy, number, 0 if searches else None

    def planned(self, iteration: int, layer: int, plan: LayerPlan) -> None:
        """Show how far the strategy is. The simulator calls this after every plan."""
        what = f"iteration {iteration + 1}/{self._num_iterations}"
        if self._num_searched is not None:
            self._num_searched += 1
            what = f"searching where it pays ({self._num_searched:,} layers planned)"
        now_s, is_live = time.monotonic(), self._console.is_terminal
        if now_s - self._shown_s < (_LIVE_INTERVAL_S if is_live else _PLAIN_INTERVAL_S):
            return
        self._shown_s = now_s
        text = f"{self._strategy} ({self._number} of {self._num_strategies} strategies): {what}"
        if is_live:
            self._status.update(text)
        else:
            self._console.print(text, highlight=False)
