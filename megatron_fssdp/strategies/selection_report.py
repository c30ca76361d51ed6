"""What was chosen for every layer, what that is to save, and what the last choice has saved."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_fssdp.strategies.iteration_spread import IterationSpread

LEAST_OF_ITERATION = 0.01
"""Part of a measured iteration that changes have to save together to be made."""


@dataclass(frozen=True)
class LayerSelection:
    """One layer's strategy.

    Attributes:
        layer: Megatron's layer number.
        strategy: What is chosen.
        before: What the layer had; the same if nothing changes.
        modelled_s: Seconds of an iteration of the layer under each candidate.
    """

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
    """A change's promise, and the iterations before and after it.

    Attributes:
        predicted_s: Modelled seconds of an iteration that it was to save.
        before: Iterations before it.
        after: Iterations since.
    """

    predicted_s: float
    before: IterationSpread
    after: IterationSpread

    @property
    def seen_s(self) -> float:
        """Seconds by which the median iteration became shorter; loads may have changed meanwhile."""
        return self.before.median_s - self.after.median_s

    @property
    def is_slower(self) -> bool:
        """Whether iterations clearly take longer since."""
        return self.after.is_slower_than(self.before)


@dataclass(frozen=True)
class SelectionReport:
    """One look at all layers of a pipeline stage.

    Attributes:
        choices: Of every layer.
        measured: Iterations since the last change, or since the start.
        seen: What the last change has brought, if that can be said.
        left_s: Modelled seconds of an iteration that other strategies would save, and that are too few.
    """

    choices: tuple[LayerSelection, ...]
    measured: IterationSpread | None
    seen: SeenSaving | None
    left_s: float = 0.0

    @property
    def is_too_little(self) -> bool:
        """Whether all changes together save less of a measured iteration than can be seen."""
        return self.measured is not None and self.saving_s < LEAST_OF_ITERATION * self.measured.median_s

    @property
    def changes(self) -> tuple[LayerSelection, ...]:
        """The layers that change."""
        return tuple(choice for choice in self.choices if choice.strategy != choice.before)

    @property
    def saving_s(self) -> float:
        """Modelled seconds of an iteration that the changes save."""
        return sum(choice.saving_s for choice in self.changes)

    def describe(self) -> list[str]:
        """In words, one line each: what the last change has brought, and what is chosen now."""
        lines = []
        if (seen := self.seen) is not None:
            whole_s = seen.before.median_s
            verdict = ": slower, so it is taken back" if seen.is_slower else ""
            lines.append(
                f"the last change was to save {_of(seen.predicted_s, whole_s)} of an iteration; seen: "
                f"{_of(seen.seen_s, whole_s)} ({1e3 * whole_s:.1f} ms before, "
                f"{1e3 * seen.after.median_s:.1f} ms since){verdict}"
            )
        chosen = ", ".join(
            f"{name} in {_numbers([c.layer for c in self.choices if c.strategy == name])}"
            for name in dict.fromkeys(choice.strategy for choice in self.choices)
        )
        if not self.changes:
            left = ""
            if self.left_s and self.measured is not None:
                left = f"; others would save {_of(self.left_s, self.measured.median_s)} of an iteration"
            return [*lines, f"nothing changes: {chosen}{left}"]
        gain = f"predicted gain {1e3 * self.saving_s:.2f} ms an iteration"
        if self.measured is not None:
            gain = f"predicted gain {_of(self.saving_s, self.measured.median_s)} of an iteration"
        changed = _numbers([choice.layer for choice in self.changes])
        return [*lines, f"chosen: {chosen}; new in {changed}; {gain}"]


def _of(part_s: float, whole_s: float) -> str:
    return f"{100 * part_s / whole_s:.1f} % ({1e3 * part_s:.2f} ms)"


def _numbers(layers: list[int]) -> str:
    """``layer 3`` or ``layers 1-4, 6``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    ranges = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"layer{'s' if len(layers) > 1 else ''} {ranges}"
