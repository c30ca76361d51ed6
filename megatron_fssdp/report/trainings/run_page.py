"""The page of one run, or of several runs that are compared with the first."""

from collections.abc import Sequence

from megatron_fssdp.report.page import Page, Section, Subject
from megatron_fssdp.report.simulations.simulation_page import ranking_section
from megatron_fssdp.report.simulations.simulation_report import SimulationReport
from megatron_fssdp.report.trainings.headline import headline_of
from megatron_fssdp.report.trainings.measures import comparison_table
from megatron_fssdp.report.trainings.placement_section import placement_section
from megatron_fssdp.report.trainings.run_sections import (
    device_load_section,
    expert_load_section,
    loss_section,
    memory_section,
    parts_section,
    settings_section,
    time_section,
)
from megatron_fssdp.report.trainings.shown_run import ShownRun, counted, progress_of

_WHAT_IF = "What if: strategies ranked on a cluster"
_NOT_ASKED = (
    "No cluster was given, so nothing was simulated. To rank all strategies on a cluster with this run's "
    "loads, give --cluster NAME (“megatron-fssdp configs” lists the names) or --cluster FILE.yaml "
    "(“megatron-fssdp profile” measures a cluster and writes the file)."
)


def run_page(
    runs: Sequence[ShownRun], what_if: SimulationReport | None = None, *, with_losses: bool = True
) -> Page:
    """Return the page of one run, or of several runs to compare with the first.

    A section that has nothing to show gives the reason.
    """
    problems = [f"{one.name}: {problem}" for one in runs for problem in one.run.problems]
    ranking = Section(_WHAT_IF, _NOT_ASKED)
    if what_if is not None:
        ranking = ranking_section(what_if, _WHAT_IF, f"{what_if.title}. ")
    figures = "Figures are of the whole run unless stated otherwise. Load: max/mean device load; 1 is even."
    unreadable = Section(
        "Files that cannot be read", "The sections that need these files are empty.", problems
    )
    sections = [
        unreadable if problems else None,
        settings_section(runs),
        parts_section(runs),
        loss_section(runs) if with_losses else None,
        time_section(runs, what_if),
        device_load_section(runs),
        expert_load_section(runs),
        placement_section(runs),
        memory_section(runs),
        ranking,
        Section("All figures", figures, [comparison_table(runs, with_losses=with_losses, what_if=what_if)]),
    ]
    return Page(
        "comparison" if len(runs) > 1 else "report",
        _title(runs),
        headline_of(runs, what_if, with_losses=with_losses),
        [Subject(one.name, one.colour, _sizes(one)) for one in runs],
        [section for section in sections if section is not None],
    )


def _title(runs: Sequence[ShownRun]) -> str:
    if len(runs) > 1:
        return " · ".join(one.name for one in runs)
    folder, strategy = runs[0].run.path.resolve().name, runs[0].run.strategy
    return folder if folder == strategy else f"{folder} ({strategy})"


def _sizes(one: ShownRun) -> str:
    words = [progress_of(one.run)]
    if one.run.layers:
        words.append(counted(len(one.run.layers), "MoE layer"))
    if one.run.loads is not None:
        _, _, num_devices, num_experts = one.run.loads.counts_ILDE.shape
        words += [counted(num_experts, "expert"), counted(num_devices, "device")]
    return ", ".join(words)
