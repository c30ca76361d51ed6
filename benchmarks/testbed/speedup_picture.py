"""Draws the speed-ups of testbed runs into one picture.

    python -m benchmarks.testbed.speedup_picture testbed.json --out speedups.png

Several files can be combined. If several files have the same workload and variant, the last file counts.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_fssdp.reporting.colours import strategy_colours
from megatron_fssdp.reporting.figures import DPI, new_figure
from megatron_fssdp.simulation.workloads import WORKLOADS

# The plugin's own strategies come first.
STRATEGIES = ("auto", "fssdp", "prophet", "fastermoe", "quota", "flexmoe", "smartmoe")


def main() -> int:
    """Read the files and write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="testbed.json")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: dict[tuple[str, str], list[float]] = {}
    for path in options.results:
        try:
            for one in json.loads(path.read_text(encoding="utf-8"))["summaries"]:
                if one["speed_up"] is not None:
                    found[one["workload"], one["variant"].partition(":")[0]] = one["speed_up"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"error: {path}: not a testbed's results ({error!r}); give a testbed.json", file=sys.stderr)
            return 2
    draw(found, options.out)
    print(f"wrote {options.out}")
    return 0


def draw(speed_up: Mapping[tuple[str, str], Sequence[float]], path: Path) -> None:
    """Draw medians and quartiles of speed-ups over the reference, with one row for each workload.

    Args:
        speed_up: 25th, 50th and 75th percentile by workload and strategy.
        path: PNG or SVG file to write.
    """
    described = {name: one.description for name, one in WORKLOADS.items()}
    described["replay"] = "loads recorded in a training"
    workloads = [name for name in described if any(of == name for of, _ in speed_up)]
    strategies = [name for name in STRATEGIES if any(of == name for _, of in speed_up)]
    figure = new_figure((9, 0.55 * len(workloads) + 1.2))
    axes = figure.add_subplot()
    axes.axvline(1, color="#888888", linewidth=1, zorder=0)
    for position, strategy in enumerate(strategies):
        offset = 0.7 * (position - (len(strategies) - 1) / 2) / len(strategies)
        rows = [row for row, name in enumerate(workloads) if (name, strategy) in speed_up]
        quarters = np.array([speed_up[workloads[row], strategy] for row in rows])
        axes.errorbar(
            quarters[:, 1],
            np.array(rows) + offset,
            xerr=np.abs(quarters[:, [0, 2]] - quarters[:, [1]]).T,
            fmt="o" if position else "D",
            color=strategy_colours()[strategy],
            elinewidth=1,
            label=strategy,
        )
    axes.set_yticks(range(len(workloads)), [f"{described[name]}  {name}" for name in workloads])
    axes.set_ylim(len(workloads) - 0.5, -0.5)
    for row in range(1, len(workloads)):
        axes.axhline(row - 0.5, color="#dddddd", linewidth=0.6, zorder=0)
    axes.set_xlabel("speed-up over Megatron's own dispatcher (median, quartiles)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.12), ncols=len(strategies), frameon=False)
    figure.savefig(path, dpi=DPI)


if __name__ == "__main__":
    sys.exit(main())
