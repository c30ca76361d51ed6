"""The router's counts of one layer in the latest iterations, and what they predict.

Shape letters: E experts, D devices.
"""

from collections import deque
from copy import copy

import numpy as np

from megatron_fssdp.planning.loads.load_forecast import MEAN, forecast_DE, forecast_errors
from megatron_fssdp.planning.loads.load_statistics import has_jumped
from megatron_fssdp.planning.placement.array_freezing import frozen_array


class LoadHistory:
    """Counts of the latest iterations, and forecasts of the next iteration's counts.

    Attributes:
        window: Most iterations whose counts are kept, w.
        num_devices: Number of source devices, D.
        num_experts: Number of experts, E.
        num_seen: Number of iterations appended so far, also those that are no longer kept.

    Raises:
        ValueError: The window or a number is less than 1.
    """

    def __init__(self, window: int, num_devices: int, num_experts: int) -> None:
        for name, value in (("window", window), ("num_devices", num_devices), ("num_experts", num_experts)):
            if value < 1:
                raise ValueError(f"{name} is {value}: wanted 1 or more")
        self.window = window
        self.num_devices = num_devices
        self.num_experts = num_experts
        self.num_seen = 0
        self._latest: deque[np.ndarray] = deque()
        self._load_E: deque[np.ndarray] = deque(maxlen=window)
        self._num_settled = 0
        self._errors: deque[np.ndarray] = deque(maxlen=window)
        # A running sum of integers is exact, so the mean does not depend on which counts came before.
        self._sum_DE = np.zeros((num_devices, num_experts), dtype=np.int64)

    def append(self, counts_DE: np.ndarray) -> None:
        """Add the counts of one iteration.

        Args:
            counts_DE: (token, k) pairs by source device and expert, integers ``[D, E]``.

        Raises:
            ValueError: The shape is wrong, the counts are not integers, or a count is negative.
        """
        counts = np.asarray(counts_DE)
        if counts.shape != (self.num_devices, self.num_experts):
            raise ValueError(
                f"counts_DE has shape {counts.shape}: wanted ({self.num_devices}, {self.num_experts}), "
                "the counts of every source device for every expert"
            )
        if counts.dtype.kind not in "iu":
            raise ValueError(f"counts_DE has dtype {counts.dtype}: wanted integers, numbers of tokens")
        if counts.size and int(counts.min()) < 0:
            source, expert = (int(i) for i in np.argwhere(counts < 0)[0])
            raise ValueError(
                f"counts_DE[{source}, {expert}] is {int(counts[source, expert])}: wanted 0 or more tokens"
            )
        kept = frozen_array(counts, np.int64)
        self.num_seen += 1
        load_E = kept.sum(axis=0)
        # A window of one iteration has one forecast: the last counts.
        if self._num_settled and self.window > 1:
            settled_IE = np.stack(list(self._load_E)[-self._num_settled :])
            if has_jumped(load_E, settled_IE.sum(axis=0)):
                # No forecast expects a jump, so the jump tells nothing about them.
                self._num_settled = 0
            else:
                self._errors.append(forecast_errors(settled_IE, load_E))
        self._num_settled = min(self._num_settled + 1, self.window)
        self._load_E.append(load_E)
        self._latest.append(kept)
        self._sum_DE += kept
        if len(self._latest) > self.window:
            self._sum_DE -= self._latest.popleft()

    def followed_by(self, counts_DE: np.ndarray) -> "LoadHistory":
        """The history that will exist after one more iteration; this history does not change.

        Args:
            counts_DE: (token, k) pairs of that iteration by source device and expert, integers ``[D, E]``.

        Raises:
            ValueError: See :meth:`append`.
        """
        following = copy(self)
        following._latest = self._latest.copy()
        following._load_E = self._load_E.copy()
        following._errors = self._errors.copy()
        following._sum_DE = self._sum_DE.copy()
        following.append(counts_DE)
        return following

    def excerpt(self, window: int, *, without_latest: int = 0) -> "LoadHistory":
        """The history that would exist with a shorter window, or some iterations earlier.

        Args:
            window: Window of the excerpt, at most this history's window.
            without_latest: Number of latest iterations that the excerpt leaves out.

        Raises:
            ValueError: ``without_latest`` is negative or more than the number of iterations kept.
        """
        if not 0 <= without_latest <= len(self._latest):
            raise ValueError(
                f"without_latest is {without_latest}: wanted 0 to {len(self._latest)}, the iterations kept"
            )
        shorter = LoadHistory(window, self.num_devices, self.num_experts)
        known = list(self._latest)[: len(self._latest) - without_latest]
        # Iterations before the window only tell since when the loads have not jumped, and which forecast
        # would have been best.
        known = known[-2 * window :]
        shorter.num_seen = self.num_seen - without_latest - len(known)
        for counts_DE in known:
            shorter.append(counts_DE)
        return shorter

    def __len__(self) -> int:
        return len(self._latest)

    @property
    def is_empty(self) -> bool:
        """Whether no iteration has been appended yet."""
        return not self._latest

    @property
    def num_since_jump(self) -> int | None:
        """Number of iterations since the loads jumped; ``None`` if all kept iterations are since then."""
        return self._num_settled if self._num_settled < len(self._latest) else None

    def mean_DE(self) -> np.ndarray:
        """Mean counts over the window, float64 ``[D, E]``; Hecate's prediction (§4.2).

        Zeros if no iteration was appended.
        """
        return self._sum_DE / max(len(self._latest), 1)

    def forecast_DE(self) -> np.ndarray:
        """Counts that the next iteration will probably have, float64 ``[D, E]``.

        The forecast is the mean, the last counts or the trend: the one that would have been closest to the
        loads of the last ``window`` iterations. Counts from before a jump say nothing about the next
        iteration and are left out. Both rules are ours and go beyond Hecate §4.2. The result is zeros if no
        iteration was appended.
        """
        best = int(np.sum(self._errors, axis=0).argmin()) if self._errors else MEAN
        if self.is_empty or (best == MEAN and self._num_settled == len(self._latest)):
            return self.mean_DE()
        return forecast_DE(np.stack(list(self._latest)[-self._num_settled :]), best)

    def mean_E(self) -> np.ndarray:
        """Mean load of every expert over the window, float64 ``[E]``."""
        return self._sum_DE.sum(axis=0) / max(len(self._latest), 1)

    def total_DE(self) -> np.ndarray:
        """Sum of the counts over the window, int64 ``[D, E]``."""
        return self._sum_DE.copy()

    def counts_DE(self, age: int) -> np.ndarray:
        """Counts of one iteration, int64 ``[D, E]``, read-only.

        Args:
            age: How many iterations before the latest one; 0 for the latest iteration.

        Raises:
            ValueError: That iteration is not kept.
        """
        if not 0 <= age < len(self._latest):
            raise ValueError(f"age is {age}: wanted 0 up to {len(self._latest) - 1}, the iterations kept")
        return self._latest[-1 - age]
