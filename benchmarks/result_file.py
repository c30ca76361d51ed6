"""Writes the result of a benchmark's run as a small file of data, see ``benchmarks/results``."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

KEYS = ("question", "answer", "date", "commit", "machine", "command", "columns", "rows")
"""Keys of a result, in the order of the file."""


def quartiles(values: Sequence[float] | np.ndarray) -> list[float]:
    """Return the 25th, 50th and 75th percentile."""
    return [float(value) for value in np.percentile(values, (25, 50, 75))]


def write_result(
    path: Path, question: str, columns: Sequence[str], rows: Sequence[Sequence[object]], answer: str = ""
) -> None:
    """Write a JSON file with one row on each line.

    Its name is ``<date>-<benchmark>-<what>.json``. Names of columns have units; a row has a cell for each.
    The answer is the conclusion in one sentence, which people write when they have read the rows.
    """
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    facts = {
        "question": question,
        "answer": answer,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": commit.stdout.strip() or "unknown",
        "machine": f"{os.cpu_count()} cores ({platform.machine()})",
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "columns": list(columns),
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}," for key, value in facts.items()]
    of_rows = ",\n".join(f"  {json.dumps(list(row), ensure_ascii=False)}" for row in rows)
    path.write_text("{\n" + "\n".join(lines) + f'\n "rows": [\n{of_rows}\n ]\n}}\n', encoding="utf-8")
    print(f"wrote {path}")
