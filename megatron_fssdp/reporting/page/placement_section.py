"""Which device had which expert at a chosen iteration: the data of the page's viewer.

Shape letters: I iterations, L MoE layers, E experts, D devices, S shown iterations.
"""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.reporting.page.device_load_section import NO_LAYERS
from megatron_fssdp.reporting.page.reported_run import ReportedRun
from megatron_fssdp.reporting.page.section import Section

MOST_ITERATIONS = 200
MOST_BYTES = 2_000_000
"""Of all runs of a page together."""

_LEAD = (
    "Experts from left to right, devices from top to bottom: the owner keeps parameters and optimizer state, "
    "a replica is a copy of the weights for an iteration or more. Bars above: tokens that the router gave to "
    "each expert. Bars at the right: tokens that each device computed, over a frame of what it would have "
    "had under plain expert parallelism. Move the slider (arrow keys work) to another iteration."
)


_NOT_THERE = (
    "There is no placements.npz (yet): it is written now and then and at the end, by runs of this version on."
)


def placement_section(runs: Sequence[ReportedRun]) -> Section:
    """The place of the viewer, or why there is none.

    Args:
        runs: The page's runs.
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
    """Everything that the viewer draws from, of the runs that recorded it.

    Args:
        runs: The page's runs.

    Returns:
        Plain values; arrays are base64 of little-endian bytes, in the order iteration, layer, and:
        ``owned`` and ``present`` bits by expert and device (rows of whole bytes, first bit highest),
        ``expert`` uint32 tokens by expert, ``before`` and ``after`` uint32 tokens by device.
    """
    recorded = [run for run in runs if run.placements is not None and run.loads is not None]
    return [data for run in recorded if (data := _data_of(run, MOST_BYTES // len(recorded)))]


def shown_iterations(num_iterations: int, bytes_of_one: int, most_bytes: int) -> NDArray[np.int64]:
    """Indices of the iterations there is room for, evenly spread, the first and the last among them."""
    most = max(2, min(MOST_ITERATIONS, most_bytes // max(1, bytes_of_one)))
    return np.unique(np.linspace(0, num_iterations - 1, min(most, num_iterations)).round().astype(np.int64))


def _data_of(run: ReportedRun, most_bytes: int) -> dict[str, Any] | None:
    placements, loads = run.placements, run.loads
    assert placements is not None
    assert loads is not None
    # Both files are written now and then, not at once.
    common, at_placements, at_loads = np.intersect1d(
        placements.iterations, loads.iterations, return_indices=True
    )
    if not len(common):
        return None
    _, num_layers, num_experts, num_devices = placements.present_ILED.shape
    bytes_of_one = num_layers * (2 * num_experts * -(-num_devices // 8) + 4 * num_experts + 8 * num_devices)
    chosen_S = shown_iterations(len(common), bytes_of_one, most_bytes)
    at_placements, at_loads = at_placements[chosen_S], at_loads[chosen_S]
    return {
        "name": run.name,
        "colour": run.colour,
        "recorded": len(common),
        "iterations": common[chosen_S].tolist(),
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
