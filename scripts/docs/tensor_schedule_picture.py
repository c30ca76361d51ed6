"""Draw Parm's schedules: the forward pass of one layer by the cost model, on the paper's testbed B."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.papers.parm_testbeds import Testbed
from megatron_fssdp.planning.cost.tensor_schedules import (
    SCHEDULES,
    Collective,
    Schedule,
    ScheduledLayer,
    collectives_of,
    rows_of_device,
)

TESTBED = Testbed("parm-b", 32)
N_MP = N_ESP = 4
FFN_SIZE = 8192
LAYER = ScheduledLayer(
    num_tokens=8 * 1024, hidden_size=2048, num_rows=1.2 * 8 * 1024, n_mp=N_MP, n_esp=N_ESP, n_ep=32 // N_ESP
)
NAMES = {
    "all_to_all": "all-to-all",
    "overlapped_all_to_all": "what SAA's all-to-all\nadds to the gather",
    "all_gather": "gather",
    "reduce_scatter": "reduce-\nscatter",
    "all_reduce": "all-reduce",
}
GROUPS = {"mp": "MP", "esp": "ESP", "ep": "EP", "ep_esp": "EP&ESP"}
COLOURS = {"mp": "#c8d9ec", "esp": "#d9c8ec", "ep": "#c9c9c9", "ep_esp": "#aebfae"}
EXPERTS, INK = "#f2c879", "#1c1c1c"


def pieces(schedule: Schedule) -> list[tuple[str, str, float]]:
    """Return label, colour and seconds of each piece of a forward pass, in order."""
    costs = TESTBED.costs(N_MP, N_ESP)
    found = collectives_of(schedule, LAYER)
    # Experts compute after the last collective that brings rows, and before results are returned.
    before = {"baseline": 2, "megatron": 2, "s1": 1, "s2": 1}[schedule]
    flops = 2 * 2 * LAYER.hidden_size * FFN_SIZE / N_ESP
    experts_s = rows_of_device(schedule, LAYER) * flops / TESTBED.flops_per_s
    drawn = [(_words(one), COLOURS[one.over], _seconds(one, costs)) for one in found]
    return [*drawn[:before], ("experts", EXPERTS, experts_s), *drawn[before:]]


def _seconds(one: Collective, costs: object) -> float:
    return costs[one.kind, one.over].time_s(one.num_bytes)  # type: ignore[index]


def _words(one: Collective) -> str:
    return f"{GROUPS[one.over]}\n{NAMES[one.kind]}"


def _row(axes: Axes, y: float, schedule: Schedule, longest_s: float) -> float:
    start_s = 0.0
    for words, colour, seconds in pieces(schedule):
        axes.barh(y, 1e3 * seconds, 0.8, 1e3 * start_s, color=colour, edgecolor="white", linewidth=1)
        if seconds > 0.045 * longest_s:
            size = 8 if seconds > 0.08 * longest_s else 6
            axes.text(
                1e3 * (start_s + seconds / 2), y, words, ha="center", va="center", fontsize=size, color=INK
            )
        start_s += seconds
    axes.text(
        1e3 * (start_s + 0.006 * longest_s), y, f"{1e3 * start_s:.0f} ms", va="center", fontsize=9, color=INK
    )
    return start_s


def draw() -> Figure:
    """Return a picture of all schedules, one below the other."""
    figure = Figure(figsize=(10.5, 3.9), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    longest_s = max(sum(seconds for _, _, seconds in pieces(schedule)) for schedule in SCHEDULES)
    for row, schedule in enumerate(SCHEDULES):
        _row(axes, -row, schedule, longest_s)
    axes.set_yticks([-row for row in range(len(SCHEDULES))], SCHEDULES)
    axes.set_xlim(0, 1.08e3 * longest_s)
    axes.set_xlabel(
        "milliseconds of one layer's forward pass, even loads; 32 GPUs of Parm's testbed B, MP = ESP = 4",
        fontsize=9,
    )
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    kinds = [
        ("experts", EXPERTS),
        *((f"among {GROUPS[group]} ranks", colour) for group, colour in COLOURS.items()),
    ]
    handles = [Patch(facecolor=colour, label=label) for label, colour in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds), fontsize=8, frameon=False)
    return figure
