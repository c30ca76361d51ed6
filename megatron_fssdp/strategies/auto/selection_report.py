"""A report of ``auto``: the selected strategies, their predicted saving, and what the last change saved."""

from collections.abc import Sequence
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
        """The spread of the given seconds; ``None`` without any."""
        return cls(len(seconds), *np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()) if seconds else None


@dataclass(frozen=True)
class SeenSaving:
    """Modelled saving of a change, and the measured iterations before and after it."""

    predicted_s: float
    before: IterationSpread
    after: IterationSpread

    @property
    def seen_s(self) -> float:
        """Seconds by which the median iteration became shorter; the loads can also have changed since."""
        return self.before.median_s - self.after.median_s

    @property
    def is_slower(self) -> bool:
        """Whether three quarters of the iterations since take longer than three quarters of those before."""
        return self.after.low_s > self.before.high_s


@dataclass(frozen=True)
class SelectionReport:
    """The result of one selection for all layers of a pipeline stage.

    Attributes:
        before: Strategy of each layer before the selection, by the layer's number; ``selected`` now.
        measured: Times of the iterations since the last change or since the start.
        seen: Saving of the last change; ``None`` if there is nothing to compare.
        left_s: Modelled seconds that others would save, if that was too little for a change.
    """

    before: dict[int, str]
    selected: dict[int, str]
    saving_s: float
    measured: IterationSpread | None
    seen: SeenSaving | None
    left_s: float = 0.0

    @property
    def changes(self) -> tuple[int, ...]:
        """Numbers of the layers that change their strategy."""
        return tuple(layer for layer, name in self.selected.items() if name != self.before[layer])

    def describe(self) -> list[str]:
        """Lines for the log: what the last change saved, and which strategies are selected now."""
        lines, whole_s, seen = [], None if self.measured is None else self.measured.median_s, self.seen
        if seen is not None:
            before_s = seen.before.median_s
            verdict = "; iterations are slower, so the change is reverted" if seen.is_slower else ""
            lines.append(
                f"the last change was predicted to save {_of(seen.predicted_s, before_s)} of an iteration "
                f"and saved {_of(seen.seen_s, before_s)}: {1e3 * before_s:.1f} ms before, "
                f"{1e3 * seen.after.median_s:.1f} ms since{verdict}"
            )
        selected = ", ".join(
            f"{name} in {_numbers([layer for layer, one in self.selected.items() if one == name])}"
            for name in dict.fromkeys(self.selected.values())
        )
        if not self.changes:
            left = f"; others would save {_of(self.left_s, whole_s)} of an iteration" if self.left_s else ""
            return [*lines, f"nothing changes: {selected}{left}"]
        gain = f"predicted gain {_of(self.saving_s, whole_s)} of an iteration"
        return [*lines, f"selected: {selected}; new in {_numbers(self.changes)}; {gain}"]


def _of(part_s: float, whole_s: float | None) -> str:
    """A part of an iteration in milliseconds, and in percent if the iteration is measured."""
    part = f"{1e3 * part_s:.2f} ms"
    return part if whole_s is None else f"{100 * part_s / whole_s:.1f} % ({part})"


def _numbers(layers: Sequence[int]) -> str:
    """Layer numbers as a text, for example ``layer 3`` or ``layers 1-4, 6``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    ranges = ", ".join("-".join(map(str, run)) for run in runs)
    return f"layer{'s' if len(layers) > 1 else ''} {ranges}"
