"""A report of ``auto``: the selected strategies, and their predicted saving."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SelectionReport:
    """The result of one selection for all layers of a pipeline stage.

    ``before`` has the strategy of each layer before the selection, by the layer's number, and ``selected``
    the one since. The changes save ``saving_s`` modelled seconds of an iteration.
    """

    before: dict[int, str]
    selected: dict[int, str]
    saving_s: float

    @property
    def changes(self) -> tuple[int, ...]:
        """Numbers of the layers that change their strategy."""
        return tuple(layer for layer, name in self.selected.items() if name != self.before[layer])

    def describe(self) -> str:
        """A line for the log: which strategies are selected now."""
        selected = ", ".join(
            f"{name} in {_numbers([layer for layer, one in self.selected.items() if one == name])}"
            for name in dict.fromkeys(self.selected.values())
        )
        if not self.changes:
            return f"nothing changes: {selected}"
        gain = f"predicted gain {1e3 * self.saving_s:.2f} ms of an iteration"
        return f"selected: {selected}; new in {_numbers(self.changes)}; {gain}"


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
