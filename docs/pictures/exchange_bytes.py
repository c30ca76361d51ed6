"""Draws docs/pictures/exchange_bytes.svg: bytes between nodes under the deduplicated exchange, by top-k.

usage: python docs/pictures/exchange_bytes.py [FILE.svg | FILE.png]
"""

import sys
from math import comb
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

NODES, TOP_K = (2, 4, 8), range(1, 9)
EXPERTS = {16: "-", 256: ":"}

MEASURED = {2: 0.905, 4: 0.736, 8: 0.492}
"""Bytes of the busiest interface by top-k, relative to ``ep``: 4 nodes × 2 ranks, balanced, docs/log.md."""

COLOURS = ("#0072b2", "#d55e00", "#009e73")  # of 2, 4 and 8 nodes
LOADS = Path(__file__).parents[2] / "benchmarks/testbed/recorded_loads"
RECORD = LOADS / "gpt_moe_tiny_16_experts_top8_loads.npz"


def share(num_experts: int, num_nodes: int, top_k: int) -> float:
    """Expected number of different nodes of a token over its number of experts."""
    missed = comb(num_experts - num_experts // num_nodes, top_k) / comb(num_experts, top_k)
    return num_nodes * (1 - missed) / top_k


def recorded_share(top_k: int) -> float:
    """The same number from the tokens of a training."""
    tokens_N = np.load(RECORD)["by_nodes_ILN"].sum(axis=(0, 1))
    return float((tokens_N * np.arange(1, len(tokens_N) + 1)).sum() / tokens_N.sum() / top_k)


def draw(path: Path) -> None:
    """Write the picture.

    Args:
        path: SVG or PNG file.
    """
    matplotlib.rcParams.update({"svg.hashsalt": "exchange", "svg.fonttype": "none", "font.size": 10})
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for colour, num_nodes in zip(COLOURS, NODES, strict=False):
        for num_experts, line in EXPERTS.items():
            shares = [share(num_experts, num_nodes, top_k) for top_k in TOP_K]
            axes.plot(TOP_K, shares, line, color=colour, linewidth=1.8)
        axes.text(8.12, shares[-1], f"{num_nodes} nodes", color=colour, va="center")
    axes.plot([], [], "-", color="#555555", label="algebra, 16 experts")
    axes.plot([], [], ":", color="#555555", label="algebra, 256 experts")
    axes.plot(
        list(MEASURED),
        list(MEASURED.values()),
        "o",
        color=COLOURS[1],
        markersize=8,
        label="measured on the testbed, 4 nodes",
    )
    axes.plot(
        [8],
        [recorded_share(8)],
        "D",
        markerfacecolor="none",
        markeredgecolor="black",
        markersize=13,
        label="recorded in a training, 4 nodes",
    )
    axes.set(
        xlabel="experts of a token (top-k)",
        ylabel="bytes between nodes, relative to\none row for each expert",
        xlim=(0.8, 9.1),
        ylim=(0, 1.05),
        xticks=list(TOP_K),
    )
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
