"""The router's counts of one layer in the latest iterations, what they predict, and statistics of loads.

Shape letters: I iterations, E experts, D devices.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_fssdp.planning.arrays import checked_counts, frozen_array

JUMP = 0.2
"""Share of the load that must have moved to other experts before this counts as a jump."""

EVEN_LOAD = 1.1
"""Max/mean device load under plain expert parallelism up to which balancing has little to gain."""


class LoadHistory:
    """Counts of the latest iterations, at most ``window``, and forecasts of the next iteration's counts.

    ``num_seen`` also counts iterations that are no longer kept. Of the latest iteration, single micro-batches
    are kept as well, if they are known.
    """

    def __init__(self, window: int, num_devices: int, num_experts: int) -> None:
        self.window, self.num_devices, self.num_experts = window, num_devices, num_experts
        self.num_seen = 0
        self._latest: deque[np.ndarray] = deque(maxlen=window)
        self._loads: deque[np.ndarray] = deque(maxlen=window)  # the same by expert
        self._num_settled = 0
        # For each iteration, the shares of load that the mean and the last counts had put on wrong experts.
        self._errors: deque[tuple[float, float]] = deque(maxlen=window)
        self._sum_DE = np.zeros((num_devices, num_experts), dtype=np.int64)
        self._micro_batches: Sequence[Callable[[], np.ndarray]] = ()
        self._forecast_DE: np.ndarray | None = None  # of the next iteration, once it was asked for
        self._mean_E: np.ndarray | None = None
        self._num_repeats = 0  # iterations, one after the other, with the array of the one before
        self._excerpts: dict[int, LoadHistory] = {}  # by window, of now

    def append(self, counts_DE: np.ndarray, micro_batches: Sequence[Callable[[], np.ndarray]] = ()) -> None:
        """Add the (token, k) pairs of one iteration, integers ``[D, E]``, or raise a ValueError.

        ``micro_batches`` give those of the single micro-batches, of which few are asked for.
        """
        is_same = bool(self._latest) and counts_DE is self._latest[-1]
        kept = checked_counts(counts_DE, self.num_devices, self.num_experts) if not is_same else counts_DE
        self._num_repeats = self._num_repeats + 1 if is_same else 0
        self._micro_batches = micro_batches
        self.num_seen += 1
        if self.repeats:
            for shorter in self._excerpts.values():
                shorter.num_seen, shorter._micro_batches = self.num_seen, micro_batches
            return
        load_E = kept.sum(axis=0)
        # A window of one iteration has one forecast: the last counts.
        if self._num_settled and self.window > 1:
            settled = list(self._loads)[-self._num_settled :]
            forecasts = np.asarray(sum(settled)), settled[-1]
            if has_jumped(load_E, forecasts[0]):
                # No forecast expects a jump, so the jump tells nothing about them.
                self._num_settled = 0
            else:
                alike = (load_similarity(load_E, forecast_E) for forecast_E in forecasts)
                mean, last = (0.0 if similarity is None else 1 - similarity for similarity in alike)
                self._errors.append((mean, last))
        self._num_settled = min(self._num_settled + 1, self.window)
        self._sum_DE += kept - (self._latest[0] if len(self._latest) == self.window else 0)
        self._latest.append(kept)
        self._loads.append(load_E)
        self._excerpts, self._forecast_DE, self._mean_E = {}, None, None

    @property
    def repeats(self) -> bool:
        """Whether so many of the latest iterations have the same counts that another one changes nothing.

        All counts of the window are then the same read-only array, and all errors of forecasts are theirs.
        """
        return self._num_repeats > 2 * self.window

    def excerpt(self, window: int, *, without_latest: int = 0) -> "LoadHistory":
        """The history that would exist with a shorter window, or ``without_latest`` iterations earlier.

        It is for reading only, until the next iteration.
        """
        if window in self._excerpts and not without_latest:
            return self._excerpts[window]
        shorter = LoadHistory(window, self.num_devices, self.num_experts)
        # Iterations before the window only tell since when the loads have not jumped, and which forecast
        # would have been best.
        known = list(self._latest)[: len(self._latest) - without_latest][-2 * window :]
        shorter.num_seen = self.num_seen - without_latest - len(known)
        for counts_DE in known:
            shorter.append(counts_DE)
        if not without_latest:
            shorter._micro_batches, self._excerpts[window] = self._micro_batches, shorter
        return shorter

    def state(self) -> dict[str, Any]:
        """All that is known, for :meth:`resume`: lists of numbers, and one int32 array ``[I, D, E]``."""
        counts_IDE = np.reshape(list(self._latest), (-1, self.num_devices, self.num_experts))
        return {
            "counts_IDE": counts_IDE.astype(np.int32),
            "errors": [list(pair) for pair in self._errors],
            "num_settled": self._num_settled,
            "num_seen": self.num_seen,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue with what a history of the same window knew; a ValueError if sizes or counts are wrong."""
        resumed = LoadHistory(self.window, self.num_devices, self.num_experts)
        for counts_DE in state["counts_IDE"]:
            resumed.append(np.asarray(counts_DE, dtype=np.int64))
        # Those of iterations before the oldest kept one count, too.
        resumed._errors.clear()
        resumed._errors.extend((float(mean), float(last)) for mean, last in state["errors"])
        resumed._num_settled = min(int(state["num_settled"]), len(resumed))
        resumed.num_seen = int(state["num_seen"])
        vars(self).update(vars(resumed))

    def __len__(self) -> int:
        return len(self._latest)

    @property
    def is_empty(self) -> bool:
        """Whether no iteration has been appended yet."""
        return not self._latest

    def mean_DE(self) -> np.ndarray:
        """Mean counts of the window, float64 ``[D, E]``, zeros at first; Hecate's prediction (§4.2)."""
        return self._sum_DE / max(len(self._latest), 1)

    def forecast_DE(self) -> np.ndarray:
        """Counts that the next iteration will probably have, float64 ``[D, E]``, zeros at first (ours).

        The mean since a jump evens out small batches, and the last counts follow a gate that wanders: the one
        that would have been closest in the last ``window`` iterations is taken. The array is read-only.
        """
        if self._forecast_DE is None:
            self._forecast_DE = self._closest_DE()
            self._forecast_DE.setflags(write=False)
        return self._forecast_DE

    def _closest_DE(self) -> np.ndarray:
        mean, last = np.sum(self._errors, axis=0) if self._errors else (0.0, 0.0)
        if last < mean:
            return self._latest[-1].astype(np.float64)
        if self._num_settled == len(self._latest):
            return self.mean_DE()
        return np.mean(list(self._latest)[-self._num_settled :], axis=0)

    def mean_E(self) -> np.ndarray:
        """Mean load of every expert over the window, float64 ``[E]``."""
        if self._mean_E is None:
            self._mean_E = frozen_array(self._sum_DE.sum(axis=0) / max(len(self), 1), np.float64)
        return self._mean_E

    def total_DE(self) -> np.ndarray:
        """Sum of the counts over the window, int64 ``[D, E]``."""
        return self._sum_DE.copy()

    def counts_DE(self, age: int) -> np.ndarray:
        """Counts of ``age`` iterations before the latest one, int64 ``[D, E]``, read-only."""
        return self._latest[-1 - age]

    def iterations_like(self, most: int) -> list[np.ndarray]:
        """Counts that the latest iteration would have if all its micro-batches were like one of them.

        int64 ``[D, E]``, for at most ``most`` micro-batches, evenly chosen; of the iteration itself if single
        micro-batches are not known.
        """
        known = self._micro_batches
        times, number = len(known), min(len(known), most)
        return [times * known[n * times // number]() for n in range(number)] or [self.counts_DE(0)]


def max_over_mean(load_D: np.ndarray) -> float:
    """Highest load of a device divided by the mean; 1 if there is no load."""
    total = load_D.sum()
    return float(load_D.max() * len(load_D) / total) if total else 1.0


def load_similarity(load_E: np.ndarray, before_E: np.ndarray) -> float | None:
    """Share of the load on the same experts as before, ``Σ_e min(p_e, q_e)``; ``None`` if a load is empty.

    Pro-Prophet (§II, Fig. 4) calls this locality. Loads ``[E]`` are of any two batch sizes.
    """
    total, total_before = float(load_E.sum()), float(before_E.sum())
    if not total or not total_before:
        return None
    return float(np.minimum(load_E / total, before_E / total_before).sum())


def has_jumped(load_E: np.ndarray, before_E: np.ndarray) -> bool:
    """Whether more of the load has moved to other experts than slow drift and random sampling explain.

    In recorded trainings, 5 to 9 % of a layer's load moves from one iteration to the next, at most 25 %, and
    sampling explains a third of that. Loads ``[E]`` may be sums over several iterations.
    """
    similarity = load_similarity(load_E, before_E)
    if similarity is None:
        return False
    total, total_before = float(load_E.sum()), float(before_E.sum())
    share_E = (load_E + before_E) / (total + total_before)
    # Expected distance of two samples of the same distribution, with counts assumed to be independent.
    chance = np.sqrt(share_E * (1 / total + 1 / total_before) * 2 / np.pi).sum() / 2
    return bool(1 - similarity > JUMP + 2 * chance)


def balance_ratio(before_D: np.ndarray, after_D: np.ndarray) -> float | None:
    """Ratio RB of Pro-Prophet (§VI): spread of device loads ``[D]`` before over after balancing.

    The spread is the standard deviation. ``None`` means exactly even after, 1 even before and after.
    """
    before, after = float(np.std(before_D)), float(np.std(after_D))
    if after == 0.0:
        return 1.0 if before == 0.0 else None
    return before / after
