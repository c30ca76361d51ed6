"""Draws the speed-ups of testbed runs into one picture.

    python -m benchmarks.testbed.speedup_picture testbed.json --out speedups.png

Several files can be combined. If several files have the same workload and variant, the last file counts.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megatron_fssdp.report.colours import strategy_colours

# The plugin's own strategies come first.
STRATEGIES = ("auto", "fssdp", "prophet", "fastermoe", "quota", "flexmoe", "smartmoe")
WORKLOADS = {
    "W0": "balanced",
    "W1": "half of all tokens on one device's experts",
    "W2": "half of all tokens, on several devices",
    "W3": "40 % of all tokens on one expert",
    "W4": "uneven sources, balanced experts",
    "W5": "idle experts and an idle device",
    "W6": "busy device changes every 3 iterations",
    "W7": "bursts on random experts",
    "lognormal-weak": "log-normal, sigma 0.5",
    "lognormal-medium": "log-normal, sigma 1",
    "lognormal-strong": "log-normal, sigma 1.5",
    "replay": "loads recorded in a training",
}


def main() -> int:
    """Read the files and write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="testbed.json")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for path in options.results:
        try:
            for one in json.loads(path.read_text(encoding="utf-8"))["summaries"]:
                found[one["workload"], one["variant"].partition(":")[0]] = {"speed_up": None, **one}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            print(f"error: {path}: not a testbed's results ({error!r}); give a testbed.json", file=sys.stderr)
            return 2
    draw(list(found.values()), options.out)
    print(f"wrote {options.out}")
    return 0


def draw(summaries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw medians and quartiles of speed-ups over the reference, with one row for each workload.

    Args:
        summaries: The entries ``summaries`` of ``testbed.json`` files.
        path: PNG or SVG file to write.
    """
    speed_up = {
        (one["workload"], one["variant"].partition(":")[0]): one["speed_up"]
        for one in summaries
        if one["speed_up"] is not None
    }
    workloads = [name for name in WORKLOADS if any(of == name for of, _ in speed_up)]
    strategies = [name for name in STRATEGIES if any(of == name for _, of in speed_up)]
    figure = Figure(figsize=(9, 0.55 * len(workloads) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(1, color="#888888", linewidth=1, zorder=0)
    for position, strategy in enumerate(strategies):
        offset = 0.7 * (position - (len(strategies) - 1) / 2) / len(strategies)
        rows = [
            (row, speed_up[name, strategy])
            for row, name in enumerate(workloads)
            if (name, strategy) in speed_up
        ]
        places = [row + offset for row, _ in rows]
        medians = [values[1] for _, values in rows]
        spread = [
            [values[1] - values[0] for _, values in rows],
            [values[2] - values[1] for _, values in rows],
        ]
        is_first = strategy == STRATEGIES[0]
        axes.errorbar(
            medians,
            places,
            xerr=spread,
            fmt="D" if is_first else "o",
            markersize=7 if is_first else 5,
            color=strategy_colours()[strategy],
            elinewidth=1,
            label=strategy,
        )
    axes.set_yticks(range(len(workloads)), [_label(name) for name in workloads])
    axes.set_ylim(len(workloads) - 0.5, -0.5)
    for row in range(1, len(workloads)):
        axes.axhline(row - 0.5, color="#dddddd", linewidth=0.6, zorder=0)
    axes.set_xlabel("speed-up over Megatron's own dispatcher (median, quartiles)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.12), ncols=len(strategies), frameon=False)
    figure.savefig(path, dpi=150)


def _label(workload: str) -> str:
    """A workload's description, and its name if the description does not contain it."""
    meaning = WORKLOADS[workload]
    return meaning if workload.startswith("lognormal") else f"{meaning}  {workload}"


if __name__ == "__main__":
    sys.exit(main())
