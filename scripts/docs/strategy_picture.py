"""Draw docs/pictures/strategy_fssdp.svg: what ep and fssdp make of the same uneven load.

usage: python scripts/docs/strategy_picture.py [FILE]

Shape letters: I iterations, L MoE layers, D devices, E experts.
"""

import string
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_fssdp.cli.analysis.strategy_ranking import described_cluster
from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.strategy.strategy_registry import BASELINE, STRATEGIES
from megatron_fssdp.planning.cost.link_seconds import topology_of
from megatron_fssdp.simulation.lanes import ALL_TO_ALL, COMPUTE, TRANSFER
from megatron_fssdp.simulation.moe_job import MoeJob, job_of_run
from megatron_fssdp.simulation.simulator import StrategyOutcome, simulate
from megatron_fssdp.simulation.workloads import WORKLOADS, WorkloadShape
from megatron_fssdp.strategies.layer_plan import LayerPlan

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "strategy_fssdp.svg"

PARTS = ("models/hecate-gpt-moe-s", "parallelism/hecate-a", "training/measure")
JOB = (
    *("model.num_layers=2", "model.num_experts=16", "data.vocab_size=1024"),
    *("parallelism.num_nodes=2", "parallelism.nproc_per_node=4", "parallelism.expert_model_parallel_size=8"),
    *("training.micro_batch_size=4", "training.global_batch_size=32"),
)
CLUSTER = ("hecate-a", ("num_nodes=2", "devices_per_node=4"))
WORKLOAD, ITERATIONS, LAYER = "lognormal-medium", 30, 0
SLOTS = 2
"""Most replicas of a layer on a device. Without a limit all of these small experts would be everywhere."""

OWNED, REPLICA, MOVED = "#d3d7dc", "#f2b872", "#cdb7e2"
SPANS = {
    "compute": ("attention, gate, dense", "#A0BCDB"),
    "experts": ("experts", "#2F5A88"),
    "tokens": ("tokens to experts and back (all-to-all)", "#76B7B2"),
    "weights": ("experts' weights", "#D55E00"),
    "gradients": ("experts' gradients", "#E69F00"),
}
"""Name and colour of each kind of span; reports show the waits that it can cause in the same colour."""
INK, FAINT = "#1c1c1c", "#6a6a6a"


@dataclass(frozen=True, eq=False)
class Case:
    """One strategy under the load that all pictures share.

    Attributes:
        name: Name of the strategy.
        plan: Plan of the layer that is drawn, in the last iteration.
        outcome: Simulated outcome of all iterations.
        tokens_DE: (token, k) pairs that each device computes for each expert, int ``[D, E]``.
    """

    name: str
    plan: LayerPlan
    outcome: StrategyOutcome
    tokens_DE: np.ndarray

    @property
    def max_over_mean(self) -> float:
        """Load of the busiest device over the mean."""
        load_D = self.tokens_DE.sum(axis=1)
        return float(load_D.max() / load_D.mean())

    @property
    def iteration_ms(self) -> float:
        """Simulated milliseconds of the last iteration."""
        return 1e3 * float(self.outcome.iteration_s[-1])


def job_and_cluster() -> tuple[MoeJob, ClusterDescription]:
    """Return a job of two GPT-MoE-S layers with 16 experts, and its cluster of two nodes of four V100."""
    return job_of_run(load_run(PARTS, JOB)), described_cluster(*CLUSTER)


def case(name: str) -> Case:
    """Simulate one strategy and keep its last decisions."""
    job, cluster = job_and_cluster()
    tokens = int(job.tokens_per_micro_batch * job.num_micro_batches)
    shape = WorkloadShape(job.num_devices, job.num_experts, tokens, job.top_k, ITERATIONS)
    counts_ILDE = np.stack(
        [WORKLOADS[WORKLOAD].counts(shape, seed) for seed in range(job.num_layers)], axis=1
    )
    plans: dict[tuple[int, int], LayerPlan] = {}
    outcome = simulate(
        name,
        STRATEGIES[name].settings.model_validate({} if name == BASELINE else {"slots": SLOTS}),
        counts_ILDE,
        cluster,
        job,
        on_plan=lambda iteration, layer, plan: plans.update({(iteration, layer): plan}),
    )
    plan = plans[ITERATIONS - 1, LAYER]
    dispatch = plan.dispatch(counts_ILDE[-1, LAYER], topology_of(cluster, job.num_devices))
    tokens_DE = np.zeros((job.num_devices, job.num_experts))
    for source in range(job.num_devices):
        tokens_DE += dispatch.sent_ED(source).T
    return Case(name, plan, outcome, tokens_DE)


def draw_bars(axes: Axes, drawn: Case, top: float) -> None:
    """Draw the load of each device, expert by expert."""
    num_devices, num_experts = drawn.tokens_DE.shape
    home_E = np.arange(num_experts) // (num_experts // num_devices)
    owner_E = drawn.plan.placement.owner_E
    for device, tokens_E in enumerate(drawn.tokens_DE / 1e3):
        bottom = 0.0
        for expert in sorted(range(num_experts), key=lambda e: (owner_E[e] != device, e)):
            height = tokens_E[expert]
            if not height:
                continue
            colour = REPLICA if owner_E[expert] != device else MOVED if home_E[expert] != device else OWNED
            axes.bar(device, height, 0.8, bottom, color=colour, edgecolor="white", linewidth=0.8)
            if height > 0.075 * top:  # a letter is 6 % of the axis high
                letter = string.ascii_uppercase[expert]
                axes.text(
                    device, bottom + height / 2, letter, ha="center", va="center", fontsize=8, color=INK
                )
            bottom += height
    mean = drawn.tokens_DE.sum() / num_devices / 1e3
    axes.axhline(mean, color=INK, linewidth=0.8, linestyle=":")
    axes.axvline(num_devices / 2 - 0.5, color=FAINT, linewidth=0.8)
    axes.set_ylim(0, 1.04 * top)
    axes.set_xticks(range(num_devices))
    axes.set_xlabel("device (two nodes of four; dotted: the mean)", fontsize=9)
    axes.set_ylabel("thousand assignments (token, expert)", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    title = "plain expert parallelism (ep)" if drawn.name == BASELINE else drawn.name
    axes.set_title(f"{title}: busiest device {drawn.max_over_mean:.2f} × the mean", fontsize=10, loc="left")


def draw_timeline(axes: Axes, cases: list[Case]) -> None:
    """Draw what runs at which time in the last iteration, lane by lane, one strategy below the other."""
    lanes = (COMPUTE, ALL_TO_ALL, TRANSFER)
    ticks, longest = {}, max(drawn.iteration_ms for drawn in cases)
    for row, drawn in enumerate(cases):
        base = -4 * row
        for i, lane in enumerate(lanes):
            ticks[base - i] = f"{drawn.name}: {lane}s" if lane != COMPUTE else f"{drawn.name}: {lane}"
        for lane, name, begin_s, end_s in drawn.outcome.spans(ITERATIONS - 1):
            if lane not in lanes:
                continue  # The host's fractions of a millisecond would only be hairlines.
            y, width = base - lanes.index(lane), 1e3 * (end_s - begin_s)
            axes.barh(
                y, width, 0.8, 1e3 * begin_s, color=_colour(lane, name), edgecolor="white", linewidth=0.5
            )
        end = drawn.iteration_ms
        axes.plot([end, end], [base - 2.45, base + 0.45], color=INK, linewidth=1.2)
        axes.text(
            end + 0.008 * longest, base - 1, f"{end:.1f} ms", ha="left", va="center", fontsize=9, color=INK
        )
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.set_xlim(0, 1.09 * longest)
    axes.set_xlabel("simulated milliseconds of one iteration: two layers forward, then backward", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _colour(lane: str, name: str) -> str:
    if lane == COMPUTE:
        return SPANS["experts" if name.startswith("experts") else "compute"][1]
    if lane == ALL_TO_ALL:
        return SPANS["tokens"][1]
    return SPANS["gradients" if name.startswith("spRS") else "weights"][1]


def draw(cases: list[Case]) -> Figure:
    """Return a picture of two strategies, side by side and one below the other."""
    figure = Figure(figsize=(10.5, 6.3), facecolor="white", layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1))
    top = max(drawn.tokens_DE.sum(axis=1).max() for drawn in cases) / 1e3
    for column, drawn in enumerate(cases):
        draw_bars(figure.add_subplot(grid[0, column]), drawn, top)
    draw_timeline(figure.add_subplot(grid[1, :]), cases)
    kinds = [
        ("an owner's expert", OWNED),
        ("a replica", REPLICA),
        ("an expert that has changed its owner", MOVED),
        *SPANS.values(),
    ]
    drawn_colours = {to_hex(patch.get_facecolor()) for axes in figure.axes for patch in axes.patches}
    drawn_colours |= {colour.lower() for _, colour in SPANS.values()}
    handles = [Patch(facecolor=c, label=label) for label, c in kinds if c.lower() in drawn_colours]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def write(file: Path) -> None:
    """Write the picture.

    Args:
        file: File to write.
    """
    settings = {"svg.fonttype": "none", "svg.hashsalt": "fssdp", "font.family": "sans-serif"}
    with matplotlib.rc_context(settings):
        draw([case(BASELINE), case("fssdp")]).savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
