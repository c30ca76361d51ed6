"""The top of a simulation's page: the result in one sentence, and its most important numbers."""

from megatron_fssdp.config.strategy.strategy_registry import BASELINE
from megatron_fssdp.reporting.html.html_page import Headline, Tile
from megatron_fssdp.reporting.simulation_report import RankedStrategy, SimulationReport
from megatron_fssdp.reporting.units import format_memory, format_seconds
from megatron_fssdp.simulation.break_even import LEAST_GAIN

_WAITS = ("waiting for spAG", "waiting for spRS")


def simulation_headline(report: SimulationReport) -> Headline:
    """Return the top of the page.

    Args:
        report: Results of the simulation.
    """
    best = report.ranked[0]
    if best.outcome.memory.runs_out:
        return Headline(f"Simulated: no strategy fits into the memory of a device. {_needs(best)}.", ())
    seconds, load = report.steady_s(best.outcome), report.steady_load(best.outcome)
    ratio, plain_load = report.plain_s / seconds, report.steady_load(report.plain)
    waits_s = sum(report.steady_parts_s(best.outcome)[part] for part in _WAITS)
    if best.outcome is report.plain or ratio <= 1:
        clauses = [
            f"no simulated strategy is faster than {BASELINE}, which takes {format_seconds(report.plain_s)}"
        ]
    elif ratio <= 1 + LEAST_GAIN:
        clauses = [
            f"no simulated strategy is more than {100 * LEAST_GAIN:.0f} % faster than {BASELINE}, which "
            f"takes {format_seconds(report.plain_s)}"
        ]
    else:
        clauses = [
            f"{best.label} is {ratio:.2f} × as fast as {BASELINE} ({format_seconds(report.plain_s)} → "
            f"{format_seconds(seconds)} for an iteration)",
            f"busiest device {plain_load:.2f} → {load:.2f} × mean load",
            f"it waits {format_seconds(waits_s) if waits_s else '0 ms'} for weights and gradients",
        ]
    if waiting := [row.label for row in report.rows if not report.is_settled(row)]:
        clauses.append(f"simulate more iterations to rank {', '.join(waiting)}, still in the warm-up")
    clauses.append(f"balanced routing would take {format_seconds(report.ceiling_s)}")
    tiles = (
        Tile(f"fastest: {best.label}", f"{ratio:.2f} × {BASELINE}", "simulated, not measured"),
        Tile("time of an iteration", format_seconds(seconds), f"{BASELINE} {format_seconds(report.plain_s)}"),
        Tile(
            "of the speed under balanced routing",
            f"{100 * report.ceiling_s / seconds:.0f} %",
            f"{BASELINE} {100 * report.ceiling_s / report.plain_s:.0f} %",
        ),
        Tile("busiest device / mean load", f"{load:.2f} ×", f"{BASELINE} {plain_load:.2f} ×; 1 is even"),
        Tile("peak memory of a device", format_memory(best.outcome.memory.total_bytes), _room(best)),
    )
    return Headline(f"Simulated: {'; '.join(clauses)}.", tiles)


def _needs(row: RankedStrategy) -> str:
    memory = row.outcome.memory
    assert memory.capacity_bytes is not None
    needed, has = format_memory(memory.total_bytes), format_memory(memory.capacity_bytes)
    return f"{row.label} needs {needed}, and a device has {has}"


def _room(row: RankedStrategy) -> str:
    capacity = row.outcome.memory.capacity_bytes
    return "estimated" if capacity is None else f"estimated; a device has {format_memory(capacity)}"
