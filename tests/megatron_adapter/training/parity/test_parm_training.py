"""Complete trainings under Parm's schedules through Megatron's command line: losses equal stock Megatron's.

Megatron itself trains these layouts with sequence parallelism only; without it losses are the same.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fssdp.reporting.records.run_records import read_metrics

from ...training_run import TrainingRun, relative_difference, train_on_all_ranks
from .test_strategy_parity import cheap_links

NO_BIAS = "--disable-bias-linear"
SEQUENCE = "--sequence-parallel"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
AUX_LOSS = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"
SEQ_AUX_LOSS = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MOE_RECOMPUTE = "--recompute-granularity selective --recompute-modules moe"

SCHEDULES = [
    f"parm --moe-strategy-set schedule={name}" for name in ("baseline", "megatron", "s1", "s2", "auto")
]
FSSDP = " --moe-strategy-set ".join(["fssdp", "slots=2", "overlap_degree=3", "reshard_interval=3"])

# Ranks, arguments, and arguments that stock Megatron needs beside sequence parallelism.
LAYOUTS: dict[str, tuple[int, str] | tuple[int, str, str]] = {
    "parts": (4, f"--tensor-model-parallel-size 2 --expert-model-parallel-size 2 {NO_BIAS} {AUX_LOSS}"),
}
MORE: dict[str, tuple[int, str] | tuple[int, str, str]] = {
    "whole_experts": (
        4,
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 4 "
        f"{SEQ_AUX_LOSS} --global-batch-size 16 {NO_BIAS}",
    ),
    # Under sequence parallelism Megatron 0.19 sums the biases' gradients of different experts.
    "biases": (
        4,
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 4 "
        "--global-batch-size 16 --make-vocab-size-divisible-by 2",
        # The vocabulary is padded as on two ranks, because padded words count in the softmax.
        "--tensor-model-parallel-size 1 --make-vocab-size-divisible-by 4",
    ),
    "pipeline_overlaps": (
        8,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
        f"{NO_BIAS} {OVERLAPS} --swiglu --global-batch-size 16",
    ),
    "interleaved_recomputed": (
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 "
        f"--num-layers-per-virtual-pipeline-stage 1 {NO_BIAS} {FULL_RECOMPUTE} {AUX_LOSS}",
    ),
    "tp4_copies_shared": (
        4,
        "--tensor-model-parallel-size 4 --expert-tensor-parallel-size 1 --expert-model-parallel-size 2 "
        f"{NO_BIAS} --moe-shared-expert-intermediate-size 32 --use-distributed-optimizer",
    ),
    "top1_bf16_recomputed": (
        4,
        "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --bf16 --moe-router-topk 1 "
        f"--moe-router-pre-softmax {NO_BIAS} {MOE_RECOMPUTE} --swiglu",
    ),
    "expert_bias": (
        4,
        "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 "
        f"{NO_BIAS} --moe-router-enable-expert-bias --moe-router-score-function sigmoid {AUX_LOSS}",
    ),
    "per_token_loss": (
        4,
        "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --calculate-per-token-loss "
        f"{NO_BIAS} {AUX_LOSS} --global-batch-size 16",
    ),
    "ep1": (2, f"--tensor-model-parallel-size 2 {NO_BIAS}"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_equal_stock_megatron(name: str, text_data: Path, tmp_path: Path) -> None:
    _compare(name, text_data, tmp_path, ["parm --moe-strategy-set schedule=s2", FSSDP], 6)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", {**LAYOUTS, **MORE})
def test_losses_equal_stock_megatron_in_more_layouts(name: str, text_data: Path, tmp_path: Path) -> None:
    _compare(name, text_data, tmp_path, [*SCHEDULES, FSSDP], 20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["parts", "whole_experts", "interleaved_recomputed"])
def test_layers_can_change_strategy_and_schedule_while_training(
    name: str, text_data: Path, tmp_path: Path
) -> None:
    """Under ``auto``, s2 is used only in layers without replicas."""
    record = f"--moe-strategy-set record_dir={tmp_path / 'record'}"
    often = "--moe-strategy-set profile_iterations=1 --moe-strategy-set choice_interval=1"
    _compare(name, text_data, tmp_path, [f"auto {often} {record}"], 20, before=prefer_s2)
    layers = [layer for entry in read_metrics(tmp_path / "record") for layer in entry.layers]
    assert {layer.strategy for layer in layers if layer.schedule == "s2"} <= {"ep", "smartmoe"}
    assert any(layer.schedule == "s2" for layer in layers)
    assert any(layer.num_replicas for layer in layers)


def prefer_s2() -> None:
    """Run on every rank before the launch: select every strategy in turn, and s2 wherever it is possible."""
    cheap_links()
    from megatron_fssdp.megatron_adapter.layer import schedule_selector

    schedule_selector.best_schedule = lambda predicted: "s2" if "s2" in predicted else next(iter(predicted))


@pytest.mark.parametrize("costs", ["", "--moe-strategy-set cluster=parm-b"])
def test_the_selected_schedule_is_logged_and_recorded(costs: str, text_data: Path, tmp_path: Path) -> None:
    ranks, arguments, *_ = LAYOUTS["parts"]
    chosen = f"parm --moe-strategy-set record_dir={tmp_path} {costs}"
    run = _train(ranks, f"{arguments} --train-iters 2 --moe-strategy {chosen}", text_data)
    (message,) = {text for text in run.messages if "] schedule " in text}
    metrics = read_metrics(tmp_path)
    assert len(metrics) == 2
    for layer in metrics[-1].layers:
        assert layer.schedule in ("s1", "s2", "megatron")
        assert layer.schedule_predicted_s is not None
        assert set(layer.schedule_predicted_s) == {"s1", "s2", "megatron"}
        assert layer.schedule == min(layer.schedule_predicted_s, key=layer.schedule_predicted_s.__getitem__)
        assert f"schedule {layer.schedule} " in message


def test_indivisible_sequences_are_refused(text_data: Path) -> None:
    ranks, arguments, *_ = LAYOUTS["parts"]
    odd = "--seq-length 15 --max-position-embeddings 15"
    failed = train_on_all_ranks(
        ranks, f"{arguments} {odd} --moe-strategy parm --moe-strategy-set schedule=s1", text_data
    )
    assert all(run.exit_code == 2 for run in failed)
    assert all("schedule=s2" in run.errors for run in failed)
    run = _train(ranks, f"{arguments} {odd} --train-iters 2 --moe-strategy parm", text_data)
    assert any("schedule s2 " in message for message in run.messages)


def _compare(
    name: str,
    data: Path,
    folder: Path,
    strategies: list[str],
    num_iterations: int,
    before: Callable[[], None] | None = None,
) -> None:
    ranks, arguments, *others = {**LAYOUTS, **MORE}[name]
    stock = f"{others[0] if others else SEQUENCE} --moe-strategy none"
    # Megatron initializes weights differently under sequence parallelism, so all runs load one checkpoint.
    save = f"--save {folder} --save-interval 1 --ckpt-format torch_dist"
    _train(ranks, f"{arguments} {stock} --train-iters 1 {save}", data)
    load = f"--load {folder} --finetune --no-load-optim --no-load-rng"
    arguments = f"{arguments} {load} --train-iters {num_iterations}"
    wanted = _train(ranks, f"{arguments} {stock}", data)
    tolerance = 2e-3 if "--bf16" in arguments else 1e-5
    for strategy in strategies:
        run = _train(ranks, f"{arguments} --moe-strategy {strategy}", data, before)
        assert relative_difference(run.losses, wanted.losses) <= tolerance, strategy
        assert relative_difference(run.grad_norms, wanted.grad_norms) <= 30 * tolerance, strategy


def _train(ranks: int, arguments: str, data: Path, before: Callable[[], None] | None = None) -> TrainingRun:
    runs = train_on_all_ranks(ranks, arguments, data, before=before)
    failed = next((run for run in runs if run.exit_code), None)
    assert failed is None, failed.errors[-3000:]
    messages = tuple(message for run in runs for message in run.messages)
    return TrainingRun(runs[-1].losses, runs[-1].grad_norms, 0, "", messages)
