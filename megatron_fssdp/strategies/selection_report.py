"""A report of ``auto``: the selected strategies, their predicted saving, and what the last change saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEAST_SEEN = 4
"""Smallest number of iterations for which quartiles are meaningful."""


@dataclass(frozen=True)
class IterationSpread:
    """Lower quartile, median and upper quartile of the seconds of ``num_seen`` iterations."""

    num_seen: int
    low_s: float
    median_s: float
    high_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "IterationSpread | None":
        """The spread of the given seconds; ``None`` if there are no seconds."""
        if not seconds:
            return None
        low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
        return cls(len(seconds), low, median, high)

    def is_slower_than(self, other: "IterationSpread") -> bool:
        """Whether three quarters of these iterations take longer than three quarters of the other ones.

        The answer is False if one side has fewer than :data:`LEAST_SEEN` iterations.
        """
        return min(self.num_seen, other.num_seen) >= LEAST_SEEN and self.low_s > other.high_s


LEAST_OF_ITERATION = 0.01
"""Fraction of a measured iteration that all changes together must save; otherwise no change is made."""


@dataclass(frozen=True)
class LayerSelection:
    """The selected strategy of the layer with this number, the one before, and all candidates' seconds."""

    layer: int
    strategy: str
    before: str
    modelled_s: Mapping[str, float]

    @property
    def saving_s(self) -> float:
        """Modelled seconds of an iteration that the change saves."""
        return self.modelled_s[self.before] - self.modelled_s[self.strategy]


@dataclass(frozen=True)
class SeenSaving:
    """The modelled seconds that a change should save, and the measured iterations before and after it."""

    predicted_s: float
    before: IterationSpread
    after: IterationSpread

    @property
    def seen_s(self) -> float:
        """Seconds by which the median iteration became shorter; the loads can also have changed since."""
        return self.before.median_s - self.after.median_s

    @property
    def is_slower(self) -> bool:
        """Whether iterations clearly take longer since the change."""
        return self.after.is_slower_than(self.before)


@dataclass(frozen=True)
class SelectionReport:
    """The result of one selection for all layers of a pipeline stage.

    Attributes:
        selections: Selection for every layer.
        measured: Times of the iterations since the last change or since the start.
        seen: Predicted and measured saving of the last change; ``None`` if they cannot be compared.
        left_s: Modelled seconds that others would save in an iteration, if that was too little for a change.
    """

    selections: tuple[LayerSelection, ...]
    measured: IterationSpread | None
    seen: SeenSaving | None
    left_s: float = 0.0

    @property
    def is_too_little(self) -> bool:
        """Whether all changes together save less than :data:`LEAST_OF_ITERATION` of a measured iteration."""
        return self.measured is not None and self.saving_s < LEAST_OF_ITERATION * self.measured.median_s

    @property
    def changes(self) -> tuple[LayerSelection, ...]:
        """Selections of the layers that change their strategy."""
        return tuple(one for one in self.selections if one.strategy != one.before)

    @property
    def saving_s(self) -> float:
        """Modelled seconds that all changes together save in an iteration."""
        return sum(change.saving_s for change in self.changes)

    def describe(self) -> list[str]:
        """Lines for the log: what the last change saved, and which strategies are selected now."""
        lines, whole_s = [], None if self.measured is None else self.measured.median_s
        if (seen := self.seen) is not None:
            before_s = seen.before.median_s
            verdict = "; iterations are slower, so the change is reverted" if seen.is_slower else ""
            lines.append(
                f"the last change was predicted to save {_of(seen.predicted_s, before_s)} of an iteration "
                f"and saved {_of(seen.seen_s, before_s)}: {1e3 * before_s:.1f} ms before, "
                f"{1e3 * seen.after.median_s:.1f} ms since{verdict}"
            )
        selected = ", ".join(
            f"{name} in {_numbers([one.layer for one in self.selections if one.strategy == name])}"
            for name in dict.fromkeys(one.strategy for one in self.selections)
        )
        if not self.changes:
            left = f"; others would save {_of(self.left_s, whole_s)} of an iteration" if self.left_s else ""
            return [*lines, f"nothing changes: {selected}{left}"]
        changed = _numbers([change.layer for change in self.changes])
        gain = f"predicted gain {_of(self.saving_s, whole_s)} of an iteration"
        return [*lines, f"selected: {selected}; new in {changed}; {gain}"]


def _of(part_s: float, whole_s: float | None) -> str:
    """A part of an iteration in milliseconds, and in percent if the iteration is measured."""
    part = f"{1e3 * part_s:.2f} ms"
    return part if whole_s is None else f"{100 * part_s / whole_s:.1f} % ({part})"


def _numbers(layers: list[int]) -> str:
    """Layer numbers as a text, for example ``layer 3`` or ``layers 1-4, 6``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if not runs or layer != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(layer)
    ranges = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"layer{'s' if len(layers) > 1 else ''} {ranges}"
