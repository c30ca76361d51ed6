"""Page section on the simulated peak memory of a device under every strategy."""

from typing import Any

from megatron_fssdp.reporting.html.section import GREY, Figure, Section, titled
from megatron_fssdp.reporting.simulation_report import SimulationReport
from megatron_fssdp.reporting.units import format_memory, memory_unit
from megatron_fssdp.simulation.device_memory import DeviceMemory

_KINDS = {
    "experts of the device": ("#4E79A7", lambda memory: memory.experts.expert_parallelism_bytes),
    "replicas and their transfers": ("#F28E2B", lambda memory: memory.experts.above_expert_parallelism_bytes),
    "dense parameters": ("#A9B4C2", lambda memory: memory.dense_bytes),
    "activations (estimated)": ("#76B7B2", lambda memory: memory.activation_bytes),
}
"""Colour and bytes of each kind of memory. Owners and replicas have the colours of the placement viewer."""


def memory_section(report: SimulationReport) -> Section:
    """Make the section with stacked bars of memory, and the memory that a device has.

    Args:
        report: Results of the simulation.
    """
    memories: dict[str, DeviceMemory] = {row.label: row.outcome.memory for row in report.ranked}
    unit, word = memory_unit(max(memory.total_bytes for memory in memories.values()))
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "y": list(memories),
            "x": [bytes_of(memory) / unit for memory in memories.values()],
            "marker": {"color": colour},
            "hovertemplate": f"%{{y}}: %{{x:.4g}} {word}<extra>{kind}</extra>",
        }
        for kind, (colour, bytes_of) in _KINDS.items()
    ]
    layout: dict[str, Any] = {
        "barmode": "stack",
        "bargap": 0.3,
        "xaxis": titled(f"peak memory of a device, {word}", rangemode="tozero"),
        "yaxis": {"autorange": "reversed", "automargin": True},
    }
    lead = (
        "Memory of the device that needs most: parameters, gradients and optimizer states of its experts and "
        "of everything else, replicas, and activations with the rows of the most loaded device."
    )
    capacity = report.plain.memory.capacity_bytes
    if capacity is not None:
        lead += f" A device has {format_memory(capacity)}."
        # A line far to the right of all bars would squeeze them.
        if capacity < 2 * max(memory.total_bytes for memory in memories.values()):
            place = capacity / unit
            ends = {"xref": "x", "x0": place, "x1": place, "yref": "paper", "y0": 0, "y1": 1}
            line = {"color": GREY, "dash": "dash", "width": 1.5}
            name = "memory of a device"
            layout["shapes"] = [{"type": "line", **ends, "line": line, "showlegend": True, "name": name}]
    return Section("memory", "Memory", lead, (Figure("memory", traces, layout, 170 + 34 * len(memories)),))
