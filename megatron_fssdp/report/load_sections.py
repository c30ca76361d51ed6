"""Sections on the loads of devices and experts, of runs and of loads that no run has recorded.

Shape letters: I iterations, L MoE layers, E experts.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.records.loads import RecordedLoads
from megatron_fssdp.report import figures
from megatron_fssdp.report.page import Part, Section

NO_LAYERS = (
    "No loads of MoE layers were recorded: the model has none, or Megatron's CUDA graphs dispatch its tokens "
    "under strategy none."
)
# Loads are shown once if their mean difference is smaller: placement does not change what routers do, so runs
# with the same seed have the same loads.
_SAME = 0.01


class DeviceLoads(NamedTuple):
    """Max/mean device loads of a run, or of loads that nothing has balanced."""

    name: str
    colour: str
    iterations: NDArray[np.int64]
    layers: Sequence[int]
    before_IL: NDArray[np.float64]  # under plain expert parallelism
    after_IL: NDArray[np.float64]  # as it was computed


def device_load_section(shown: Sequence[DeviceLoads], missing: Sequence[str] = ()) -> Section:
    """Show max/mean device load by iteration and layer, before and after. ``missing`` are notes on others."""
    title = "Device load"
    if not shown:
        return Section(title, NO_LAYERS)
    lines: list[figures.Line] = []
    maps: list[Part] = []
    sentence = (
        "Tokens of the busiest device, divided by the mean of all devices: 1 is even, and a layer takes "
    )
    sentence += "as long as its busiest device."
    for run in shown:
        x, is_plain = run.iterations, np.array_equal(run.before_IL, run.after_IL)
        loads = {"plain EP": run.after_IL}
        if not is_plain:
            loads = {"before (plain EP)": run.before_IL, "after": run.after_IL}
            before_I = run.before_IL.mean(axis=1)
            lines += [] if lines else [figures.Line("before (plain EP)", figures.GREY, x, before_I, "dash")]
        lines.append(figures.Line(run.name, run.colour, x, run.after_IL.mean(axis=1)))
        if len(shown) == 1 or not is_plain:
            names, heading = list(map(str, run.layers)), f"{run.name}: every layer"
            maps.append(figures.heat_maps(heading, "layer", "max / mean", x, loads, names))
    figure = figures.device_loads("Busiest device, mean of layers", lines)
    return Section(title, sentence, [figure, *maps, *missing])


def expert_load_section(loads: Mapping[str, RecordedLoads], missing: Sequence[str] = ()) -> Section:
    """Show the load of every expert over an even share, equal loads once."""
    maps: list[Part] = []
    notes = [*missing]
    shown: dict[str, NDArray[np.float64]] = {}
    for name, recorded in loads.items():
        tokens_ILE = recorded.of_whole_iterations().counts_ILDE.sum(axis=2, dtype=np.int64)
        load_ILE = tokens_ILE / np.maximum(tokens_ILE.mean(axis=2, keepdims=True), 1e-12)
        if twin := next((earlier for earlier, seen in shown.items() if _is_same(seen, load_ILE)), ""):
            words = f"its loads differ from those of {twin} by less than {_SAME:.0%}"
            notes.append(f"{name} is not shown: {words}.")
        else:
            shown[name] = load_ILE
            about = (name if len(loads) > 1 else "", "× even share", recorded.iterations, recorded.layers)
            maps.append(figures.expert_maps(*about, load_ILE, len(loads)))
    title = "Expert load over iterations"
    if not maps:
        return Section(title, " ".join(missing) or NO_LAYERS)
    sentence = (
        "Tokens that the router sends to each expert, divided by an even share: pale is even, orange more, "
        "blue is less. Planning from past iterations helps experts that stay orange, and misses stripes that "
        "jump between experts."
    )
    return Section(title, sentence, [*maps, *notes])


def _is_same(first_ILE: NDArray[np.float64], second_ILE: NDArray[np.float64]) -> bool:
    return first_ILE.shape == second_ILE.shape and float(np.abs(first_ILE - second_ILE).mean()) < _SAME
