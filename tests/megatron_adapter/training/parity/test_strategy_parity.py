"""Complete trainings under every other strategy and the smart schedule have the losses of plain EP.

These strategies decide by measured costs, so links are planted to cost almost nothing: then all of them
move experts. Transfers are split nevertheless. Where prices decide about the smart schedule, one half of the
layers uses it in one iteration, and the other half in the next one. Layouts are those of the parity matrix.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.planning.cost.cost_model import LinkCost
from megatron_fssdp.planning.cost.transfer_split import TransferSplit
from megatron_fssdp.planning.loads.load_history import LoadHistory
from megatron_fssdp.reporting.records.run_records import read_metrics
from megatron_fssdp.strategies.auto.auto_strategy import AutoStrategy
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan
from megatron_fssdp.strategies.strategy import Strategy

from ...training_run import GPT, Model, TrainingRun, relative_difference, train_on_all_ranks
from .test_parity_matrix import DEFAULT, MORE, Layout

STRATEGIES = {
    "fastermoe": "slots=2",
    "prophet": "slots=2 balance=0.1",
    "quota": "slots=2",
    "smartmoe": "reshard_interval=2 window=2",
    "flexmoe": "slots=2 placement_interval=2 window=2 threshold=1.01",
    "fssdp": "slots=2 overlap_degree=3 reshard_interval=2 smart_schedule=by_price",
    "ep": "smart_schedule=true group_size=1",
    "auto": "choice_interval=1",
}
WHOLE_EXPERTS = "--expert-tensor-parallel-size 1"
TWO_NODES = Layout(4, 4, "--swiglu --disable-bias-linear --global-batch-size 16", "nodes=2")
SLOW = {
    **DEFAULT,
    **MORE,
    "copies_bf16_recomputed_moe": Layout(
        4, 2, "--bf16 --recompute-granularity selective --recompute-modules moe --global-batch-size 16", ""
    ),
}


def cheap_links() -> None:
    """Run on every rank before the launch."""
    from megatron_fssdp.runtime.layers import layer_profiling
    from megatron_fssdp.strategies import split_transfers, stepped_plans
    from megatron_fssdp.strategies.auto import auto_strategy as automatic_choice

    cost = LinkCost(0.0, 1e-13)
    layer_profiling.measure_links = lambda *_: (cost, cost)
    split_transfers.split_transfers = lambda *_, **__: TransferSplit(0.4, 0.6)
    stepped_plans.in_steps = in_turns
    automatic_choice.LEAST_SEEN = 0
    automatic_choice.AutoStrategy.price = next_in_turn


def in_turns(strategy: Strategy, context: LayerContext, history: LoadHistory, plan: LayerPlan) -> bool:
    """Have neighbouring layers differ, and each layer change after every iteration."""
    if strategy.smart_schedule == "by_price":
        return (context.layer + history.num_seen) % 2 == 0
    return bool(strategy.smart_schedule)


def next_in_turn(
    choosing: AutoStrategy, contexts: list[LayerContext], histories: list[LoadHistory]
) -> np.ndarray:
    """Have each layer select another strategy every time, so that trainings change from each to each."""
    names = list(choosing.candidates)
    seconds_LC = np.ones((len(contexts), len(names)))
    for index, context in enumerate(contexts):
        able = [name for name in names if choosing.serves(name, context)]
        following = able[(able.index(choosing.selected(context.layer)) + 1 + context.layer % 2) % len(able)]
        seconds_LC[index, names.index(following)] = 0.1
    return seconds_LC


def test_losses_equal_plain_expert_parallelism(text_data: Path, tmp_path: Path) -> None:
    wanted = compare_strategies(TWO_NODES, text_data, tmp_path)
    assert wanted.losses[-1] < wanted.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_losses_equal_plain_expert_parallelism_in_more_layouts(
    name: str, text_data: Path, tmp_path: Path
) -> None:
    compare_strategies(SLOW[name], text_data, tmp_path)


def compare_strategies(layout: Layout, data: Path, folder: Path, model: Model = GPT) -> TrainingRun:
    """Train under every strategy from one seed; return the run of plain expert parallelism.

    Args:
        layout: What is trained how.
        data: Prefix of Megatron's indexed data.
        folder: For records.
        model: What is trained.
    """
    wanted = _train(layout, "ep", "", data, folder, model)
    for strategy, settings in STRATEGIES.items():
        experts = 4 if "--num-experts 4" in layout.arguments else 8
        if strategy == "smartmoe" and experts <= layout.ep:
            continue  # refused: one expert for each device
        if strategy == "flexmoe" and "--fp16" in layout.arguments:
            continue  # refused
        if "smart_schedule" in settings and _has_parts(layout):
            continue  # refused: expert tensor parallelism
        _compare(layout, strategy, settings, wanted, data, folder, model)
    return wanted


def _has_parts(layout: Layout) -> bool:
    """Whether experts are divided over ranks."""
    arguments = layout.arguments
    is_tensor_parallel = "--tensor-model-parallel-size 2" in arguments
    return "--expert-tensor-parallel-size 2" in arguments or (
        is_tensor_parallel and WHOLE_EXPERTS not in arguments
    )


def _compare(
    layout: Layout,
    strategy: str,
    settings: str,
    wanted: TrainingRun,
    data: Path,
    folder: Path,
    model: Model,
) -> None:
    run = _train(layout, strategy, settings, data, folder, model)
    is_half = layout.is_bf16 or "--fp16" in layout.arguments
    losses, wanted_losses = run.losses + run.other_losses, wanted.losses + wanted.other_losses
    assert relative_difference(losses, wanted_losses) <= (2e-3 if is_half else 1e-5), strategy
    # Where tokens are dropped, loads are nearly even, and strategies that use exact counts can do nothing.
    drops = "--moe-expert-capacity-factor" in layout.arguments
    if strategy == "auto":
        metrics = read_metrics(folder / strategy)
        chosen = {layer.strategy for entry in metrics for layer in entry.layers}
        # A group of one device has nothing to select.
        assert len(chosen) >= 3 if layout.ep > 1 else chosen == {"ep"}, chosen
    if strategy in ("fastermoe", "prophet", "quota", "auto") and layout.replicates and not drops:
        metrics = read_metrics(folder / strategy)
        assert any(layer.num_replicas for entry in metrics for layer in entry.layers), strategy
    if strategy == "flexmoe" and layout is TWO_NODES:
        assert any("replicas: " in message for message in run.messages)
    if strategy == "smartmoe" and layout.moves:
        assert any("re-sharded" in message for message in run.messages)


def _train(
    layout: Layout, strategy: str, settings: str, data: Path, folder: Path, model: Model
) -> TrainingRun:
    keys = [*settings.split(), *(key for key in layout.settings.split() if key.startswith("nodes="))]
    if strategy in ("fastermoe", "prophet", "quota", "smartmoe", "flexmoe", "auto"):
        keys.append("profile_iterations=1")
    keys.append(f"record_dir={folder / strategy}")
    chosen = " ".join([strategy, *(f"--moe-strategy-set {key}" for key in keys)])
    arguments = (
        f"--expert-model-parallel-size {layout.ep} {layout.arguments} --train-iters {layout.num_iterations} "
        f"--moe-strategy {chosen}"
    )
    runs = train_on_all_ranks(layout.num_ranks, arguments, data, model=model, before=cheap_links)
    failed = next((run for run in runs if run.exit_code), None)
    assert failed is None, f"{strategy}: {failed.errors[-3000:]}"
    messages = tuple(message for run in runs for message in run.messages)
    return replace(runs[-1], messages=messages)
