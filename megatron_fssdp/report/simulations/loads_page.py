"""The page of loads that no run of this package recorded.

Shape letters: I iterations, L MoE layers.
"""

from megatron_fssdp.planning.load_changes import plain_load
from megatron_fssdp.planning.loads import EVEN_LOAD
from megatron_fssdp.records.loads import RecordedLoads
from megatron_fssdp.report import figures
from megatron_fssdp.report.colours import distinct_colours
from megatron_fssdp.report.page import Page, Section
from megatron_fssdp.report.simulations.simulation_page import expert_load_section, what_if_section
from megatron_fssdp.report.simulations.simulation_report import SimulationReport


def loads_page(name: str, loads: RecordedLoads, note: str, what_if: SimulationReport | None = None) -> Page:
    """Return the page of loads with as many devices as the expert-parallel groups of their model.

    ``note`` says how they were read and fitted to the model.
    """
    num_iterations, num_layers, num_devices, num_experts = loads.counts_ILDE.shape
    load_IL = plain_load(loads.counts_ILDE)
    colour, x = distinct_colours(["ep"])[0], loads.iterations
    lines = [
        figures.Line("mean of layers", colour, x, load_IL.mean(axis=1)),
        figures.Line("worst layer", colour, x, load_IL.max(axis=1), "dot"),
    ]
    sizes = f"{num_iterations:,} iterations, {num_layers} MoE layers, {num_experts} experts"
    plain = f"busiest of {num_devices} devices {load_IL.mean():.2f} × mean load under plain EP"
    sentence = f"{name}: {sizes}; {plain}"
    if load_IL.mean() <= EVEN_LOAD:
        sentence += "; loads are almost even without balancing, so plain EP would do"
    how = "Tokens of the busiest device, divided by the mean of all devices: 1 is even."
    parts = [
        figures.device_loads("Busiest device, max / mean", lines),
        figures.layer_loads("every layer", x, loads.layers.tolist(), {"plain EP": load_IL}),
        *figures.bin_words(lines),
        *([f"{note[0].upper()}{note[1:]}."] if note else []),
    ]
    sections = [Section("Device load under plain EP", how, parts), expert_load_section(loads)]
    if what_if is not None:
        sections.append(what_if_section(what_if))
    return Page("report", name, f"{sentence}.", [(name, colour, sizes)], sections)
