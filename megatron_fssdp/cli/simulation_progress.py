"""Shows how far a simulation is while it runs."""

import time
from types import TracebackType

from rich.console import Console
from rich.status import Status

from megatron_fssdp.strategies.strategy import LayerPlan

_LIVE_INTERVAL_S = 0.2
_PLAIN_INTERVAL_S = 10.0


class SimulationProgress:
    """One live line on a terminal, or a line every 10 seconds elsewhere, and none if a simulation is short.

    Args:
        console: Console that shows the progress.
        num_iterations: Number of iterations of the simulation.
        num_strategies: Number of strategies that are simulated.
    """

    def __init__(self, console: Console, num_iterations: int, num_strategies: int) -> None:
        self._console, self._num_iterations, self._num_strategies = console, num_iterations, num_strategies
        self._strategy, self._num_begun = "", 0
        self._shown_s = time.monotonic()
        self._status: Status | None = None

    def __enter__(self) -> "SimulationProgress":
        if self._console.is_terminal:
            self._status = self._console.status("simulating")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def begin(self, strategy: str) -> None:
        """Begin to simulate the next strategy."""
        self._strategy = strategy
        self._num_begun += 1

    def planned(self, iteration: int, layer: int, plan: LayerPlan) -> None:
        """Show how far the strategy is. The simulator calls this after every plan.

        Args:
            iteration: Index of the iteration.
            layer: Index of the layer.
            plan: The final plan.
        """
        self._show(f"iteration {iteration + 1}/{self._num_iterations}")

    def search(self, strategy: str) -> None:
        """Say that the values are searched at which a strategy starts to pay."""
        self._strategy = strategy
        self._show("searching where it pays", is_new=True)

    def _show(self, what: str, *, is_new: bool = False) -> None:
        now_s = time.monotonic()
        interval_s = _PLAIN_INTERVAL_S if self._status is None else 0.0 if is_new else _LIVE_INTERVAL_S
        if now_s - self._shown_s < interval_s:
            return
        self._shown_s = now_s
        text = f"{self._strategy} ({self._num_begun} of {self._num_strategies} strategies): {what}"
        if self._status is not None:
            self._status.update(text)
        else:
            self._console.print(text, highlight=False)
