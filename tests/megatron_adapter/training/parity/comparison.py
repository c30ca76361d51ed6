"""What all comparisons of trainings share: tables of layouts, and trainings under two strategies."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fssdp.reporting.records.run_records import IterationMetrics, read_metrics

from ...training_run import GPT, Model, TrainingRun, flags, relative_difference, train

DISTRIBUTED = "--use-distributed-optimizer"
OVERLAPS = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"
NO_BIAS = "--disable-bias-linear"
GATED = f"--swiglu {NO_BIAS}"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
INTERLEAVED = f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
WHOLE_EXPERTS = "--expert-tensor-parallel-size 1"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
RECOMPUTE_MOE = "--recompute-granularity selective --recompute-modules moe"
TOP1 = "--moe-router-topk 1 --moe-router-pre-softmax"
AUX_LOSS = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
EXPERT_BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
SHARED = "--moe-shared-expert-intermediate-size 32"
SHARED_OVERLAP = f"{SHARED} --moe-shared-expert-overlap {NO_BIAS}"
DROPPING = "--moe-expert-capacity-factor 1.0"
MTP = "--mtp-num-layers 1 --position-embedding-type rope"
EVALUATES = "--split 90,10,0 --eval-iters 1 --eval-interval 2"
BUCKETS = f"{OVERLAPS} --ddp-num-buckets 4"
SEQ_AUX_LOSS = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2"
Z_LOSS = f"{AUX_LOSS} --moe-z-loss-coeff 1e-3"
PARTS = f"--tensor-model-parallel-size 2 {NO_BIAS}"
WHOLE = f"--tensor-model-parallel-size 2 {WHOLE_EXPERTS}"
EVERY_OTHER = "--num-layers 4 --moe-layer-freq 2"
ADAPTIVE = "fssdp slots=2 overlap_degree=3 reshard_interval=2"
BATCH16, BATCH32 = "--global-batch-size 16", "--global-batch-size 32"


@dataclass(frozen=True)
class Layout:
    """What is trained how.

    Attributes:
        num_ranks: Ranks of the run.
        ep: Expert-parallel size.
        arguments: More of Megatron's arguments.
        settings: The strategy's keys, or the strategy's name and its keys.
        moves: Whether experts must move to other owners.
        replicates: Whether experts must be replicated.
        num_iterations: Length of the training.
        reshard_interval: Iterations between two decisions about owners.
    """

    num_ranks: int
    ep: int
    arguments: str
    settings: str
    moves: bool = True
    replicates: bool = True
    num_iterations: int = 6
    reshard_interval: int = 2

    @property
    def is_half(self) -> bool:
        """Whether the parts of a replicated expert's gradient are rounded one by one, in half precision."""
        return "--bf16" in self.arguments or "--fp16" in self.arguments


def layouts(table: str, **more: str) -> dict[str, Layout]:
    """Read a table of layouts by name, with the names of arguments above, and more names, in braces.

    A row has ``name | ranks expert-parallel-size | arguments | settings | further attributes``. The last two
    may be left out. Lines that are indented more go on with the row before.
    """
    found = {}
    table = table.format_map({**globals(), **more})
    for row in textwrap.dedent(table).strip().replace("\n ", " ").splitlines():
        name, sizes, arguments, settings, further, *_ = [*(cell.strip() for cell in row.split("|")), "", ""]
        num_ranks, ep = map(int, sizes.split())
        options: Any = {key: int(value) for key, value in (cell.split("=") for cell in further.split())}
        found[name] = Layout(num_ranks, ep, arguments, settings, **options)
    return found


def trained(
    layout: Layout, strategy: str, data: Path, *, model: Model = GPT, before: Callable[[], None] | None = None
) -> TrainingRun:
    """Train a layout under a strategy with its settings; see :func:`train`."""
    arguments = f"{layout.arguments} --train-iters {layout.num_iterations} {flags(strategy)}"
    arguments = f"--expert-model-parallel-size {layout.ep} {arguments}"
    return train(layout.num_ranks, arguments, data, model=model, before=before)


def losses_of(run: TrainingRun) -> tuple[float, ...]:
    """All losses of a run."""
    return run.losses + run.other_losses


def assert_close(run: TrainingRun, to: TrainingRun, layout: Layout, bound: float = 1e-5) -> None:
    """Check that two trainings have equal losses and gradient norms, up to rounding."""
    assert relative_difference(losses_of(run), losses_of(to)) <= (2e-3 if layout.is_half else bound)
    if any(to.grad_norms):  # Megatron computes the norm only for clipping.
        assert relative_difference(run.grad_norms, to.grad_norms) <= (2e-2 if layout.is_half else 1e-4)


def against_stock(
    layout: Layout, data: Path, folder: Path, *, bound: float = 1e-5, before: Callable[[], None] | None = None
) -> tuple[TrainingRun, list[IterationMetrics]]:
    """Train under ``none`` and under the strategy of ``layout.settings``, compare, and return the latter run.

    Args:
        layout: What is trained how.
        data: Prefix of Megatron's indexed data.
        folder: For records.
        bound: Largest relative difference of losses in fp32.
        before: Module-level function to call on each rank before the launch.
    """
    stock = trained(layout, "none", data, before=before)
    run = trained(layout, f"{layout.settings} record_dir={folder}", data, before=before)
    assert len(run.losses) == layout.num_iterations
    assert_close(run, stock, layout, bound)
    return run, read_metrics(folder)


def replicas_of(metrics: list[IterationMetrics]) -> list[int]:
    """Number of replicas in each iteration."""
    return [sum(layer.num_replicas for layer in entry.layers) for entry in metrics]
