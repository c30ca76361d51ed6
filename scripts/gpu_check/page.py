"""Writes the page of a check, which fits on one screen, and a zip of everything for a bug report."""

import json
import re
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.gpu_parity import CASES
from megatron_fssdp.files.written_files import written_whole
from scripts.gpu_check.step import Step, log_end

PAGE, SUMMARY, ZIP = "gpu_check.html", "gpu_check.json", "gpu_check.zip"

_STYLE = """body{font:14px/1.4 system-ui,sans-serif;margin:16px auto;max-width:1300px;padding:0 16px;
color-scheme:light dark} table{border-collapse:collapse;font-size:12.5px} td,th{padding:1px 10px 1px
0;text-align:left} main{display:flex;flex-wrap:wrap;gap:8px 40px} h2{font-size:15px;margin:12px 0 4px}
.failed{color:#d1242f} pre{overflow-x:auto;font-size:12px}"""
_PREDICTED = re.compile(r"replicas at most ([\d.]+ \S+)")  # in what the plugin logs
_DEVICES = {"cuda": "{} GPUs", "one-card": "one GPU, shared by {} ranks", "virtual": "{} virtual devices"}
_LIMITS = {
    "cuda": "",
    "one-card": "The ranks shared one GPU, and their messages went over gloo. The page shows whether the "
    "plugin computes the right losses there. It says nothing about NCCL, or about the speed of several GPUs.",
    "virtual": "No GPU was used: CPU processes posed as CUDA devices. The page shows whether the CUDA code "
    "paths run and compute the right losses. It says nothing about speed, real NCCL or CUDA kernels.",
}


def write_results(out: Path, steps: Sequence[Step], ranks: int, device: str) -> tuple[str, Path]:
    """Write page, summary and zip into the output folder; return the verdict and the zip.

    Raises:
        ConfigurationError: A file cannot be written.
    """
    counts = [
        sum(step.verdict == name for step in steps) for name in ("passed", "failed", "skipped", "not run")
    ]
    numbers = "{} passed, {} failed, {} skipped, {} not run".format(*counts)
    word = "FAILED" if counts[1] else "RUNNING" if counts[3] else "PASSED"
    verdict = f"{word}: {len(steps)} steps, {numbers}"
    summary = {
        "verdict": verdict,
        "device": device,
        "num_ranks": ranks,
        "steps": [{**asdict(step), "environment": dict(step.environment)} for step in steps],
        "parity": _parity(out),
    }
    with written_whole(out, "--out") as partial:
        html = page_html(out, verdict, steps, ranks, device)
        (partial / PAGE).write_text(html, encoding="utf-8")
        (partial / SUMMARY).write_text(json.dumps(summary, indent=1), encoding="utf-8")
        with zipfile.ZipFile(partial / ZIP, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in (PAGE, SUMMARY):
                archive.write(partial / name, name)
            for path in sorted([*(out / "logs").rglob("*"), *(out / "results").rglob("*")]):
                archive.write(path, path.relative_to(out))
    return verdict, out / ZIP


def page_html(out: Path, verdict: str, steps: Sequence[Step], ranks: int, device: str) -> str:
    """Return the page as HTML text that needs no other file and no network."""
    doctor = ""
    with suppress(OSError):
        doctor = (
            (out / "logs" / "doctor.txt").read_text(errors="replace").partition("<details>")[0].strip("`\n")
        )
    failed = [step for step in steps if step.verdict == "failed"]
    kind = "failed" if failed else "passed"
    body = [
        f"<h1>GPU check: {_DEVICES[device].format(ranks)}</h1>",
        f'<p class="{kind}"><b>{verdict}</b>. {ZIP}, to attach to an issue, has all logs and numbers.</p>',
        f"<p><b>{_LIMITS[device]}</b></p>",
        *(f'<p class="failed"><b>{step.name}</b>: {escape(step.reason)}</p>' for step in failed),
        "<main>",
        _losses(_parity(out)),
        _layer_times(out, is_virtual=device == "virtual"),
        _kernel_times(out),
        f"<section><h2>Machine</h2><pre>{escape(doctor)}</pre></section>",
        "</main>",
        *(
            f"<details><summary>end of the log of {step.name}</summary>"
            f"<pre>{escape(log_end(out / 'logs' / f'{step.name}.txt'))}</pre></details>"
            for step in failed
        ),
    ]
    head = f'<meta charset="utf-8"><title>{verdict}</title><style>{_STYLE}</style>'
    return (
        f'<!doctype html><!-- megatron-fssdp -->\n<html lang="en">{head}<body>{"".join(body)}</body></html>\n'
    )


def _parity(out: Path) -> list[dict[str, Any]]:
    """Return the rows that the trainings wrote, in the order of the cases."""
    order = [*CASES]
    with suppress(OSError, ValueError):
        rows = [json.loads(line) for line in (out / "results" / "parity.jsonl").read_text().splitlines()]
        return sorted(rows, key=lambda row: order.index(row["case"]))
    return []


def _losses(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of trainings, one row for each case with both precisions."""
    by_case: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["precision"]] = row
    base_gib = {row["precision"]: row["peak_gib"] for row in rows if row["case"] == "none"}
    cells = []
    for case, by_precision in by_case.items():
        line = [case]
        for precision in ("fp32", "bf16"):
            run = by_precision.get(precision)
            loss = f"{run['losses'][-1]:.6f}" if run and run["losses"] else "none" if run else ""
            line += [loss, (run["problem"] or f"{run['difference']:.1e}") if run else ""]
        last = [*by_precision.values()][-1]
        more_mib = 1024 * (last["peak_gib"] - base_gib.get(last["precision"], 0.0))
        predicted = _PREDICTED.search(last["predicted"])
        line += [
            str(last["num_replicas"]),
            str(last["num_resharded"]),
            f"{last['peak_gib']:.2f} GiB",
            f"{more_mib:.0f} MiB",
            predicted[1] if predicted else "",
        ]
        cells.append(line)
    header = (
        *("strategy", "fp32 loss", "from none", "bf16 loss", "from none"),
        *("replicas", "moved", "memory of a rank", "above none", "predicted at most"),
    )
    title = "Losses, their largest relative difference from none, and peak memory (measurements included)"
    return _table(title, header, cells)


def _layer_times(out: Path, *, is_virtual: bool) -> str:
    cells: list[tuple[str, ...]] = []
    # A step may have written anything.
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        record = json.loads((out / "results" / "gpu_layer.json").read_text(encoding="utf-8"))
        for size, of_size in record["sizes"].items():
            for variant, row in of_size["layer"].items():
                times = _ms(row["busiest_s"]), f"{row['none_over_this'][1]:.2f}"
                memory = f"{row['peak_bytes_above_weights'] / 2**30:.2f} GiB"
                cells.append((size, variant, *times, str(row["kernels"]), f"{row['replicas']:.1f}", memory))
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        record = json.loads((out / "results" / "overlap.json").read_text(encoding="utf-8"))
        for row in record["summaries"] if not is_virtual else ():
            ratio = f"{row['overlapped_over_in_turn'][1]:.2f} of in turn"
            cells.append((row["setting"], "transfers overlapped", _ms(row["seconds_overlapped"]), ratio))
    header = (
        *("size", "strategy", "busiest rank, ms (quartiles)", "none over this", "kernels", "replicas"),
        "memory above weights",
    )
    return _table("Kernels of one MoE layer under uneven loads, forward and backward", header, cells)


def _kernel_times(out: Path) -> str:
    """Return the table of single kernels, one row for each size with all of its cases."""
    cases: dict[tuple[str, str], list[str]] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads((out / "results" / "gpu_kernels.json").read_text(encoding="utf-8"))
        for part, size, case, device_us, host_us, speed in record["rows"]:
            times = [f"{us:,.0f}" for us in (device_us, host_us) if us is not None]
            shown = " / ".join(times) + (f" ({speed:,.0f} GB/s)" if speed is not None else "")
            cases.setdefault((part, size), []).append(f"{case}: {shown or 'ran'}")
    rows = [(*key, "; ".join(shown)) for key, shown in cases.items()]
    title = "Single kernels, device us / us in which the host issues them"
    return _table(title, ("part", "size", "cases"), rows)


def _ms(quartiles_s: Sequence[float]) -> str:
    low, median, high = (f"{value * 1e3:.2f}" for value in quartiles_s)
    return f"{median} ({low} to {high})"


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return f"<section><h2>{title}</h2><p>No results.</p></section>"
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    names = "".join(f"<th>{name}</th>" for name in header)
    return f"<section><h2>{title}</h2><table><tr>{names}</tr>{lines}</table></section>"
