"""Page section that shows the placement of experts at an iteration: the data of the page's viewer.

Shape letters: I iterations, L MoE layers, E experts, D devices.
"""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.reporting.html.section import Section
from megatron_fssdp.reporting.page.device_load_section import NO_LAYERS
from megatron_fssdp.reporting.page.reported_run import ReportedRun

MOST_ITERATIONS = 200
MOST_BYTES = 2_000_000
"""Maximum bytes of the viewer's data, for all runs of a page together."""

_LEAD = (
    "Columns are experts, rows are devices. The owner of an expert keeps its parameters and optimizer state. "
    "A replica is a copy of the weights for an iteration or longer. Bars above: tokens that the router sent "
    "to each expert. Bars on the right: tokens that each device computed; the frames show the tokens under "
    "plain expert parallelism. Move the slider, with the mouse or the arrow keys, to see another iteration."
)

_NOT_THERE = (
    "There is no placements.npy yet. A run adds to it in every iteration. Runs of early versions do "
    "not write it."
)


def placement_section(runs: Sequence[ReportedRun]) -> Section:
    """Make the section that contains the viewer, or the reason why there is nothing to show.

    Args:
        runs: Runs of the page.
    """
    title = "Placement at an iteration"
    shown = placement_data(runs)
    if not shown:
        missing = _NOT_THERE if any(run.records.layers for run in runs) else NO_LAYERS
        return Section("placement", title, "", missing=missing)
    notes = [
        f"{data['name']}: {len(data['iterations'])} of its {data['recorded']} iterations, evenly spread."
        for data in shown
        if len(data["iterations"]) < data["recorded"]
    ]
    return Section("placement", title, _LEAD, notes=tuple(notes), has_placement=True)


def placement_data(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Return the data that the viewer draws, for each run that recorded placements and loads.

    Args:
        runs: Runs of the page.

    Returns:
        Plain values for each run. Arrays are base64 text of little-endian bytes. ``owned`` and ``present``
        hold bits ``[S, L, E, D]``, where each row of D bits is filled up to whole bytes and the first bit is
        the highest. ``expert`` holds tokens, uint32 ``[S, L, E]``. ``before`` and ``after`` hold tokens,
        uint32 ``[S, L, D]``.
    """
    recorded = [run for run in runs if run.placements is not None and run.loads is not None]
    return [data for run in recorded if (data := _data_of(run, MOST_BYTES // len(recorded)))]


def shown_iterations(num_iterations: int, bytes_of_one: int, most_bytes: int) -> NDArray[np.int64]:
    """Return the indices of evenly spread iterations that fit into a number of bytes: int64 ``[S]``.

    The first and the last iteration are always among them.

    Args:
        num_iterations: Number of recorded iterations.
        bytes_of_one: Bytes that one iteration takes.
        most_bytes: Maximum bytes of all shown iterations.
    """
    most = max(2, min(MOST_ITERATIONS, most_bytes // max(1, bytes_of_one)))
    return np.unique(np.linspace(0, num_iterations - 1, min(most, num_iterations)).round().astype(np.int64))


def _data_of(run: ReportedRun, most_bytes: int) -> dict[str, Any] | None:
    placements, loads = run.placements, run.loads
    assert placements is not None
    assert loads is not None
    # The two files are written at different times, so one of them can hold more iterations.
    common, at_placements, at_loads = np.intersect1d(
        placements.iterations, loads.iterations, return_indices=True
    )
    if not len(common):
        return None
    _, num_layers, num_experts, num_devices = placements.present_ILED.shape
    bytes_of_one = num_layers * (2 * num_experts * -(-num_devices // 8) + 4 * num_experts + 8 * num_devices)
    chosen = shown_iterations(len(common), bytes_of_one, most_bytes)
    at_placements, at_loads = at_placements[chosen], at_loads[chosen]
    return {
        "name": run.name,
        "colour": run.colour,
        "recorded": len(common),
        "iterations": common[chosen].tolist(),
        "layers": placements.layers.tolist(),
        "experts": num_experts,
        "devices": num_devices,
        "owned": _base64(np.packbits(placements.owned_ILED[at_placements], axis=-1)),
        "present": _base64(np.packbits(placements.present_ILED[at_placements], axis=-1)),
        "expert": _base64(loads.counts_ILDE[at_loads].sum(axis=2, dtype=np.int64).astype("<u4")),
        "before": _base64(placements.ep_tokens_ILD[at_placements].astype("<u4")),
        "after": _base64(placements.tokens_ILD[at_placements].astype("<u4")),
    }


def _base64(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
