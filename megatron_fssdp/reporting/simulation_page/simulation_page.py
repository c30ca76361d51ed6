"""Makes the page of a simulation."""

from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.reporting.colours import distinct_colours
from megatron_fssdp.reporting.html.html_page import HtmlPage, Subject
from megatron_fssdp.reporting.html.section import Section
from megatron_fssdp.reporting.page.expert_load_section import bins_of, expert_load_figure
from megatron_fssdp.reporting.page.what_if_section import ranking_figure, ranking_page_table
from megatron_fssdp.reporting.records.arrays.load_records import RecordedLoads
from megatron_fssdp.reporting.simulation_page.assumptions_section import assumptions_section
from megatron_fssdp.reporting.simulation_page.course_sections import (
    device_load_section,
    replica_section,
    time_section,
)
from megatron_fssdp.reporting.simulation_page.memory_section import memory_section
from megatron_fssdp.reporting.simulation_page.simulation_headline import simulation_headline
from megatron_fssdp.reporting.simulation_report import SimulationReport
from megatron_fssdp.simulation.moe_job import MoeJob

PAGE_FILE = "simulation.html"


def simulation_page(
    report: SimulationReport, loads: RecordedLoads, cluster: ClusterDescription, job: MoeJob
) -> HtmlPage:
    """Return the page of a simulation, with the same parts and colours as the page of a run.

    Args:
        report: Results of the simulation.
        loads: Loads that were simulated.
        cluster: Cluster on which they were simulated.
        job: Training job whose sizes were simulated.
    """
    colours = distinct_colours([row.label for row in report.rows])
    colour_of = {row.label: colour for row, colour in zip(report.rows, colours, strict=True)}
    return HtmlPage(
        kind="simulation",
        title=report.title,
        subjects=[Subject(row.label, colour_of[row.label]) for row in report.ranked],
        headline=simulation_headline(report),
        sections=[
            _ranking(report),
            time_section(report, colour_of),
            device_load_section(report, colour_of),
            _expert_load(loads),
            replica_section(report, job, colour_of),
            memory_section(report),
            assumptions_section(report, cluster, job),
        ],
    )


def _ranking(report: SimulationReport) -> Section:
    lead = (
        "Mean seconds of an iteration after the warm-up, divided into parts; the fastest strategy is first. "
        "The times are simulated, not measured: every strategy decides from the loads as in a training, and "
        "the cluster's description gives the time of its decisions. The end of the page says what counts."
    )
    figure = ranking_figure(report, "ranking")
    return Section("ranking", "Ranking", lead, (figure,), ranking_page_table(report), notes=report.stars)


def _expert_load(loads: RecordedLoads) -> Section:
    bins = bins_of(loads, num_runs=1)
    lead = (
        "Tokens that the router sends to each expert, divided by an even share. Pale is an even share, "
        "orange is more, blue is less. All strategies get these loads."
    )
    figure = expert_load_figure("expert-load", loads, bins)
    notes = tuple(note for note in (bins.describe(),) if note)
    return Section("expert-load", "Expert load over iterations", lead, (figure,), notes=notes)
