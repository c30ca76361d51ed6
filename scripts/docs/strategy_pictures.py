"""Draw docs/pictures/strategy_NAME.svg: what each strategy decides for the same uneven load.

usage: python scripts/docs/strategy_pictures.py [FOLDER]           (without FOLDER: docs/pictures)

Shape letters: I iterations, L MoE layers, D devices, E experts.
"""

import string
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_fssdp.cli.analysis.simulation_inputs import described_cluster
from megatron_fssdp.config.cluster_description import ClusterDescription
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.strategy.strategy_registry import BASELINE, SHIPPED, STRATEGIES
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings
from megatron_fssdp.planning.cost.link_seconds import topology_of
from megatron_fssdp.report.colours import TIME_PARTS
from megatron_fssdp.simulation.lanes import ALL_TO_ALL, COMPUTE, TRANSFER
from megatron_fssdp.simulation.moe_job import MoeJob, job_of_run
from megatron_fssdp.simulation.simulator import StrategyOutcome, simulate
from megatron_fssdp.simulation.workloads import WORKLOADS, WorkloadShape
from megatron_fssdp.strategies.layer_plan import LayerPlan

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"

PARTS = ("models/hecate-gpt-moe-s", "parallelism/hecate-a", "training/measure")
JOB = (
    *("model.num_layers=2", "model.num_experts=16", "data.vocab_size=1024"),
    *("parallelism.num_nodes=2", "parallelism.nproc_per_node=4", "parallelism.expert_model_parallel_size=8"),
    *("training.micro_batch_size=4", "training.global_batch_size=32"),
)
CLUSTER = ("hecate-a", ("num_nodes=2", "devices_per_node=4"))
WORKLOAD, ITERATIONS, LAYER = "lognormal-medium", 30, 0  # SmartMoE and FlexMoE have acted after the 25th
SLOTS = 2
"""Most replicas of a layer on a device. Without a limit all of these small experts would be everywhere."""

OWNED, REPLICA, MOVED = "#d3d7dc", "#f2b872", "#cdb7e2"
COLOURS = {
    "compute": TIME_PARTS["other compute"],
    "experts": TIME_PARTS["experts"],
    "tokens": TIME_PARTS["all-to-all"],
    "weights": TIME_PARTS["waiting for spAG"],
    "gradients": TIME_PARTS["waiting for spRS"],
}
"""Colours of a timeline's spans, which are those of the waits that the spans can cause."""
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
    def has_moved_owners(self) -> bool:
        """Whether an expert has another owner than at the start."""
        num_devices, num_experts = self.tokens_DE.shape
        home_E = np.arange(num_experts) // (num_experts // num_devices)
        return bool((self.plan.placement.owner_E != home_E).any())

    @property
    def iteration_ms(self) -> float:
        """Simulated milliseconds of the last iteration."""
        return 1e3 * float(self.outcome.iteration_s[-1])


def job_and_cluster() -> tuple[MoeJob, ClusterDescription]:
    """Return a job of two GPT-MoE-S layers with 16 experts, and its cluster of two nodes of four V100."""
    return job_of_run(load_run(PARTS, JOB)), described_cluster(*CLUSTER)


def settings_of(name: str) -> StrategySettings:
    """Return settings with at most :data:`SLOTS` replicas on a device, so that strategies have equal memory.

    Args:
        name: Name of the strategy. The limit holds for each candidate of ``auto``.
    """
    kind = STRATEGIES[name].settings
    limited = {
        key: {"slots": SLOTS} for key in kind.model_fields.keys() & STRATEGIES.keys() if has_slots(key)
    }
    return kind.model_validate({"slots": SLOTS} if has_slots(name) else limited)


def has_slots(name: str) -> bool:
    """Whether a strategy has a limit of replicas on a device."""
    return "slots" in STRATEGIES[name].settings.model_fields


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
        settings_of(name),
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
    axes.set_ylabel("thousand (token, k) pairs", fontsize=9)
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
    axes.set_xlabel("milliseconds of one iteration: two layers forward, then backward", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _colour(lane: str, name: str) -> str:
    if lane == COMPUTE:
        return COLOURS["experts" if name.startswith("experts") else "compute"].colour
    if lane == ALL_TO_ALL:
        return COLOURS["tokens"].colour
    return COLOURS["gradients" if name.startswith("spRS") else "weights"].colour


def draw(cases: list[Case]) -> Figure:
    """Return a picture of ``ep``, alone or beside another strategy."""
    figure = Figure(figsize=(10.5, 6.3 if len(cases) > 1 else 4.9), facecolor="white", layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1) if len(cases) > 1 else (1.7, 1))
    top = max(drawn.tokens_DE.sum(axis=1).max() for drawn in cases) / 1e3
    for column, drawn in enumerate(cases):
        where = grid[0, column] if len(cases) > 1 else grid[0, :]
        draw_bars(figure.add_subplot(where), drawn, top)
    draw_timeline(figure.add_subplot(grid[1, :]), cases)
    kinds = [("an owner's expert", OWNED)]
    if any(
        (
            drawn.tokens_DE[drawn.plan.placement.owner_E, range(drawn.tokens_DE.shape[1])]
            < drawn.tokens_DE.sum(axis=0)
        ).any()
        for drawn in cases
    ):
        kinds.append(("a replica", REPLICA))
    if any(drawn.has_moved_owners for drawn in cases):
        kinds.append(("an expert that has changed its owner", MOVED))
    kinds += [
        (COLOURS["compute"].name, COLOURS["compute"].colour),
        (COLOURS["experts"].name, COLOURS["experts"].colour),
        (COLOURS["tokens"].name, COLOURS["tokens"].colour),
    ]
    if any(drawn.outcome.of_layers("replicas").any() for drawn in cases):
        kinds += [
            ("experts' weights", COLOURS["weights"].colour),
            ("experts' gradients", COLOURS["gradients"].colour),
        ]
    handles = [Patch(facecolor=colour, label=label) for label, colour in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _drawn() -> list[str]:
    """Shipped strategies that differ from ``ep`` by where experts are."""
    return [
        name
        for name, entry in STRATEGIES.items()
        if entry.package == SHIPPED and entry.strategy not in (None, STRATEGIES[BASELINE].strategy)
    ]


def draw_all(folder: Path) -> list[Path]:
    """Write all pictures.

    Args:
        folder: Existing folder that the files are written to.

    Returns:
        Paths of the written files.
    """
    import tensor_schedule_picture

    settings = {"svg.fonttype": "none", "svg.hashsalt": "fssdp", "font.family": "sans-serif"}
    with matplotlib.rc_context(settings):
        plain = case(BASELINE)
        figures = {BASELINE: draw([plain]), **{name: draw([plain, case(name)]) for name in _drawn()}}
        figures["parm"] = tensor_schedule_picture.draw()
        files = []
        for name, figure in figures.items():
            files.append(folder / f"strategy_{name}.svg")
            figure.savefig(files[-1], metadata={"Date": None})
    return files


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for path in draw_all(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES):
        print(path)
