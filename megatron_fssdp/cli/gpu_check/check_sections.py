"""The sections of a check's page: steps, losses, benchmarks, host budgets and the machine."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.cli.gpu_check.check_outcome import CheckOutcome
from megatron_fssdp.cli.gpu_check.check_steps import GPU_LAYER, OVERLAP
from megatron_fssdp.cli.gpu_check.parity import BASELINE, TOLERANCES, ParityRow
from megatron_fssdp.cli.gpu_check.step import StepResult
from megatron_fssdp.report.tables import Table


@dataclass(frozen=True)
class Section:
    """One section of the check's page; ``missing`` is the reason why there is nothing to show."""

    anchor: str
    title: str
    lead: str
    table: Table | None = None
    notes: tuple[str, ...] = ()
    missing: str = ""


NO_TIMES = "virtual devices: no times"


def check_sections(outcome: CheckOutcome) -> list[Section]:
    """Return all sections, in order. A section that has nothing to show gives the reason.

    Args:
        outcome: Everything that the check found.
    """
    return [
        _steps(outcome),
        _losses(outcome),
        _layer(outcome),
        _overlap(outcome),
        *([_findings(outcome)] if outcome.plan.is_virtual else []),
        _versions(outcome),
        _environment(outcome),
    ]


def _steps(outcome: CheckOutcome) -> Section:
    rows = tuple(
        (result.step.name, result.verdict.value, f"{result.seconds:.0f}", result.step.title, result.reason)
        for result in outcome.results
    )
    return Section(
        "steps",
        "Steps",
        "Each step ran in a process of its own, with a time limit. Seconds are the duration of the step, "
        "with the start of all processes. They are no measure of training speed.",
        table=Table(("step", "verdict", "seconds", "what it checks", "reason"), rows),
    )


def _losses(outcome: CheckOutcome) -> Section:
    tolerances = " and ".join(f"{limit:.0e} in {name}" for name, limit in TOLERANCES.items())
    return Section(
        "losses",
        "Losses of all strategies",
        f"A small GPT-MoE was trained on mock data over {outcome.plan.num_ranks} ranks, once with Megatron's "
        f"own dispatcher and experts ({BASELINE}) and once with each strategy. Seeds and data are the same. "
        f"No loss may differ from the one of {BASELINE} by more than {tolerances} (relative difference). "
        "Strategies sum the same products in another order, so small differences are expected. Plans price "
        "links as free, so that strategies act although the model is small. A strategy without replicas, "
        "bytes and moves did the same as ep in this training.",
        table=Table(
            (
                *("training", "precision", "verdict", "first loss", "last loss", "difference of the first"),
                *("largest difference", "replicas", "spAG and spRS, MB", "experts moved"),
            ),
            tuple(_loss_cells(row) for row in outcome.parity),
        ),
        missing="" if outcome.parity else "No training was run.",
    )


def _loss_cells(row: ParityRow) -> tuple[str, ...]:
    first, last = (f"{row.losses[0]:.6f}", f"{row.losses[-1]:.6f}") if row.losses else ("none", "none")
    return (
        row.case,
        row.precision.value,
        row.problem or "passed",
        first,
        last,
        _scientific(row.first_difference),
        _scientific(row.largest_difference),
        str(row.num_replicas),
        f"{row.transferred_bytes / 1e6:.2f}",
        str(row.num_resharded),
    )


def _layer(outcome: CheckOutcome) -> Section:
    found = outcome.written_json("gpu_layer.json")
    times = not outcome.plan.is_virtual
    rows = []
    for size, record in (found or {}).get("sizes", {}).items():
        for form, syncs in record["host_synchronizations"].items():
            ratio = record["megatron_over_ours"].get(form) if times else None
            rows.append(
                (
                    f"{size}, {form}",
                    _quartiles(record["seconds"][form], 1e3) if times else NO_TIMES,
                    "" if ratio is None else _quartiles(ratio),
                    "not counted" if syncs is None else str(syncs),
                    _quartiles(record["host_overhead_s"], 1e6, 0) if times and form == "ours" else "",
                )
            )
    header = ("form", "ms", "form / ours", "host synchronizations", "host µs for plan and dispatch")
    return Section(
        GPU_LAYER,
        "One layer on one device",
        "The plugin's layer under ep against Megatron's own layers, with the same work: medians and "
        "quartiles of forward and backward pass. A ratio above 1 means that the plugin's layer is faster."
        + ("" if times else f" {NO_TIMES.capitalize()}; only synchronizations were counted."),
        table=Table(header, tuple(rows)) if rows else None,
        missing="" if rows else _absent(outcome, GPU_LAYER),
    )


def _overlap(outcome: CheckOutcome) -> Section:
    found = outcome.written_json("overlap.json")
    times = not outcome.plan.is_virtual
    rows = tuple(
        (
            one["setting"],
            *(
                _quartiles(one[key], scale) if times else NO_TIMES
                for key, scale in (
                    ("seconds_overlapped", 1e3),
                    ("seconds_in_turn", 1e3),
                    ("overlapped_over_in_turn", 1.0),
                    ("spag_hidden_share_overlapped", 1.0),
                    ("sprs_hidden_share_overlapped", 1.0),
                )
            ),
        )
        for one in (found or {}).get("summaries", [])
    )
    header = ("setting", "ms, overlapped", "ms, in turn", "ratio", "spAG hidden", "spRS hidden")
    return Section(
        OVERLAP,
        "Transfers under compute",
        "Trainings with fssdp in which iterations with and without overlapped transfers alternate: medians "
        "and quartiles. A ratio below 1 means that overlapping helps."
        + ("" if times else f" {NO_TIMES.capitalize()}; the trainings only show that the code runs."),
        table=Table(header, rows) if rows else None,
        missing="" if rows else _absent(outcome, OVERLAP),
    )


def _findings(outcome: CheckOutcome) -> Section:
    reports = {
        result.step.name: [json.loads(path.read_text(encoding="utf-8")) for path in _reports(outcome, result)]
        for result in outcome.results
    }
    rows = tuple(
        (
            name,
            str(sum(len(report["findings"]) for report in of_ranks)),
            str(sum(len(report["known_findings"]) for report in of_ranks)),
            str(max(report["counts"].get("host synchronization", 0) for report in of_ranks)),
            str(max(report["counts"].get("collective", 0) for report in of_ranks)),
            str(max(report["counts"].get("P2P batch", 0) for report in of_ranks)),
        )
        for name, of_ranks in reports.items()
        if of_ranks
    )
    known = {
        finding["reason"]: None
        for of_ranks in reports.values()
        for report in of_ranks
        for finding in report["known_findings"]
    }
    return Section(
        "findings",
        "Findings of the virtual devices",
        "Virtual devices look for races between streams, memory that is given back too early, and CPU "
        "tensors among CUDA tensors. Findings and known findings are summed over ranks. Each other number is "
        "that of the rank with most of them. A finding fails its step.",
        table=Table(
            ("step", "findings", "known findings", "host synchronizations", "collectives", "P2P batches"),
            rows,
        ),
        notes=tuple(f"Known finding in Megatron's own code: {reason}" for reason in known),
        missing="" if rows else "No virtual device wrote a report.",
    )


def _reports(outcome: CheckOutcome, result: StepResult) -> list[Path]:
    return sorted((outcome.plan.findings / result.step.name).glob("rank*.json"))


def _versions(outcome: CheckOutcome) -> Section:
    devices = tuple((f"device {number}", text) for number, text in enumerate(outcome.facts.devices))
    return Section(
        "versions",
        "Versions and devices",
        f"The check began at {outcome.facts.time}.",
        table=Table(("name", "found"), (*outcome.facts.versions.items(), *devices)),
    )


def _environment(outcome: CheckOutcome) -> Section:
    found = tuple((outcome.facts.environment or {}).items())
    return Section(
        "environment",
        "Environment variables",
        "Only variables that begin with CUDA_, NCCL_, TORCH_ or MEGATRON_FSSDP_ are collected.",
        table=Table(("variable", "value"), found) if found else None,
        missing="" if found else "None of them is set (CUDA_…, NCCL_…, TORCH_…, MEGATRON_FSSDP_…).",
    )


def _absent(outcome: CheckOutcome, name: str) -> str:
    result = outcome.result_of(name)
    reason = result.reason if result is not None and result.reason else "its file was not written"
    return f"The step {name} has no results: {reason}."


def _quartiles(values: Sequence[float] | None, scale: float = 1.0, digits: int = 2) -> str:
    if values is None:
        return "nothing to measure"
    low, median, high = (f"{value * scale:.{digits}f}" for value in values)
    return f"{median} ({low} to {high})"


def _scientific(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.1e}" if value else "0"
