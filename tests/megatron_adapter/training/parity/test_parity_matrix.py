"""Complete trainings in many parallel layouts: losses equal stock Megatron's.

The matrix is data. A layout combines several of Megatron's features with several of the strategy's
settings, so that most pairs of them meet somewhere; owners move every other iteration.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatron_fssdp.reporting.records.run_records import read_metrics

from ...training_run import GPT, Model, TrainingRun, relative_difference, train_on_all_ranks

Record = Callable[[str, object], None]

DISTRIBUTED = "--use-distributed-optimizer"
OVERLAPS = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
INTERLEAVED = f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
MTP = "--mtp-num-layers 1 --position-embedding-type rope"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
RECOMPUTE_MOE = "--recompute-granularity selective --recompute-modules moe"
TOP1 = "--moe-router-topk 1 --moe-router-pre-softmax"
AUX_LOSS = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
EXPERT_BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
SHARED = "--moe-shared-expert-intermediate-size 32"
NO_BIAS = "--disable-bias-linear"
SHARED_OVERLAP = f"{SHARED} --moe-shared-expert-overlap {NO_BIAS}"
DROPPING = "--moe-expert-capacity-factor 1.0"
PADDED = f"{DROPPING} --moe-pad-expert-input-to-capacity"


@dataclass(frozen=True)
class Layout:
    """One row of the matrix.

    Attributes:
        num_ranks: Ranks of the run.
        ep: Expert-parallel size.
        arguments: More of Megatron's arguments.
        settings: The strategy's keys, relative to it.
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
    def is_bf16(self) -> bool:
        """Whether weights and gradients of experts travel in bf16."""
        return "--bf16" in self.arguments


# Cheap layouts that have little in common.
DEFAULT = {
    "copies_overlaps_bf16": Layout(
        4, 2, f"{OVERLAPS} --bf16 --global-batch-size 32 --ddp-num-buckets 4", "slots=2 overlap_degree=3"
    ),
    "interleaved_pipeline_overlaps": Layout(
        4, 2, f"{INTERLEAVED} {OVERLAPS} --swiglu {NO_BIAS}", "slots=2 overlap_degree=2 rematerialize=true"
    ),
    "experts_in_tensor_parallel_parts": Layout(
        4,
        2,
        f"{TP2} {OVERLAPS} --swiglu {NO_BIAS} {RECOMPUTE}",
        "slots=2 overlap_degree=3 nodes=2 check_plans=true dispatch_policy=exact",
    ),
    "recomputed_moe_expert_bias_calibrated": Layout(
        2,
        2,
        f"{RECOMPUTE_MOE} {EXPERT_BIAS} --global-batch-size 16",
        "slots=1 overlap_degree=2 calibrate=true profile_iterations=1",
    ),
}
# Layouts whose features other default tests cover as well.
SLOW = (
    "experts_in_tensor_parallel_parts",
    "interleaved_pipeline_overlaps",
    "recomputed_moe_expert_bias_calibrated",
)

MORE = {
    "biases_on_declared_nodes": Layout(
        4,
        4,
        "--global-batch-size 32",
        "slots=2 overlap_degree=2 nodes=2 check_plans=true dispatch_policy=exact",
    ),
    "top1_16_experts_4_micro_batches": Layout(
        2,
        2,
        f"{TOP1} --swiglu --num-experts 16 --global-batch-size 16 {NO_BIAS}",
        "slots=3 overlap_degree=4 rematerialize=true",
    ),
    "copies_top4_hecate": Layout(
        4,
        2,
        f"--moe-router-topk 4 {DISTRIBUTED} --global-batch-size 32",
        "slots=2 overlap_degree=4 planner=hecate check_plans=true dispatch_policy=exact",
    ),
    "copies_overlaps_eval": Layout(
        4,
        2,
        f"{OVERLAPS} --swiglu {NO_BIAS} --ddp-num-buckets 4 --split 90,10,0 --eval-iters 1 --eval-interval 2",
        "slots=2 overlap_degree=2 calibrate=true profile_iterations=1",
    ),
    "copies_overlaps_eval_rematerialized": Layout(
        4,
        2,
        f"{OVERLAPS} {SHARED} {NO_BIAS} --split 90,10,0 --eval-iters 1 --eval-interval 2 --clip-grad 0",
        "slots=2 overlap_degree=2 rematerialize=true overlap=false",
    ),
    "ep8_bf16_distributed": Layout(
        8,
        8,
        f"--num-experts 16 --bf16 {DISTRIBUTED} --global-batch-size 32 --swiglu {NO_BIAS}",
        "slots=2 overlap_degree=4 nodes=2 check_plans=true dispatch_policy=exact",
    ),
    "ep8_top1_dropping_hecate": Layout(
        8,
        8,
        f"{TOP1} {DROPPING} --global-batch-size 16 {AUX_LOSS}",
        "slots=1 overlap_degree=3 nodes=4 planner=hecate",
    ),
    "ep4_of_8_overlaps_recomputed": Layout(
        8,
        4,
        f"{OVERLAPS} {RECOMPUTE} --global-batch-size 64",
        "slots=2 overlap_degree=3 nodes=2 rematerialize=true dispatch_policy=exact",
    ),
    "ep1_overlaps": Layout(
        2, 1, f"{OVERLAPS} {NO_BIAS} --global-batch-size 16", "slots=2", moves=False, replicates=False
    ),
    "ep1_tp2_expert_tp1_overlaps_recomputed": Layout(
        2,
        1,
        f"{TP2} --expert-tensor-parallel-size 1 {OVERLAPS} {NO_BIAS} {RECOMPUTE_MOE}",
        "",
        moves=False,
        replicates=False,
    ),
    "tp2_expert_tp1_distributed_expert_bias": Layout(
        4,
        4,
        f"{TP2} --expert-tensor-parallel-size 1 {DISTRIBUTED} {EXPERT_BIAS} --moe-router-topk 4 {NO_BIAS}",
        "slots=2 overlap_degree=3 nodes=2",
    ),
    "tp2_expert_tp1_copies_overlaps_aux_loss": Layout(
        4,
        2,
        f"{TP2} --expert-tensor-parallel-size 1 {OVERLAPS} {AUX_LOSS} {SHARED} {NO_BIAS} --bf16",
        "slots=2 overlap_degree=2 calibrate=true profile_iterations=2",
    ),
    "tp1_expert_tp2_recomputed_calibrated": Layout(
        4,
        2,
        f"--expert-tensor-parallel-size 2 --swiglu {NO_BIAS} {RECOMPUTE} --global-batch-size 32",
        "slots=2 overlap_degree=2 calibrate=true profile_iterations=1 check_plans=true",
    ),
    "tp1_expert_tp2_dropping_gelu": Layout(
        4,
        2,
        f"--expert-tensor-parallel-size 2 {NO_BIAS} {DROPPING} {SHARED} --clip-grad 0",
        "slots=2 overlap_degree=2 overlap=false nodes=2",
    ),
    "tp2_expert_tp2_copies_distributed": Layout(
        8,
        2,
        f"{TP2} {DISTRIBUTED} --swiglu {NO_BIAS} --global-batch-size 16",
        "slots=2 overlap_degree=3 rematerialize=true check_plans=true",
    ),
    "pipeline_tp2_expert_tp2_overlaps": Layout(
        8,
        2,
        f"{PP2} {TP2} {OVERLAPS} {NO_BIAS} {AUX_LOSS}",
        "slots=2 overlap_degree=2 planner=hecate",
    ),
    "pipeline_shared_expert_4_micro_batches": Layout(
        4,
        2,
        f"{PP2} {SHARED} {NO_BIAS} --global-batch-size 16 --num-layers 4",
        "slots=2 overlap_degree=2 planner=hecate nodes=2 check_plans=true",
    ),
    "pipeline_recomputed_rematerialized": Layout(
        4,
        2,
        f"{PP2} --num-layers 4 {RECOMPUTE} --global-batch-size 16 --swiglu {NO_BIAS} {DISTRIBUTED}",
        "slots=3 overlap_degree=2 rematerialize=true calibrate=true profile_iterations=1",
    ),
    "interleaved_pipeline_bf16_expert_bias": Layout(
        4,
        2,
        f"{INTERLEAVED} {OVERLAPS} {EXPERT_BIAS} --bf16 --grad-reduce-in-bf16 --global-batch-size 16",
        "slots=2 overlap_degree=2 calibrate=true profile_iterations=1",
    ),
    "interleaved_pipeline_moe_every_other_layer": Layout(
        4,
        2,
        f"{PP2} --num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --moe-layer-freq 2 {RECOMPUTE_MOE}",
        "slots=2 overlap_degree=2 overlap=false",
    ),
    "pipeline_dense_first_stage": Layout(
        4, 2, f"{PP2} --moe-layer-freq ([0]+[1]) {OVERLAPS}", "slots=2 overlap_degree=2 nodes=2"
    ),
    "recomputed_aux_loss_shared_expert": Layout(
        4,
        4,
        f"{RECOMPUTE} {AUX_LOSS} {SHARED} {NO_BIAS} --calculate-per-token-loss --global-batch-size 32",
        "slots=2 overlap_degree=3 rematerialize=true",
    ),
    "shared_expert_overlap_gate_copies_overlaps": Layout(
        4,
        2,
        f"{OVERLAPS} {SHARED_OVERLAP} --moe-shared-expert-gate --swiglu --global-batch-size 32",
        "slots=2 overlap_degree=2 calibrate=true profile_iterations=1",
    ),
    "shared_expert_overlap_tp2_pipeline_recomputed_moe": Layout(
        8,
        2,
        f"{PP2} {TP2} {DISTRIBUTED} {SHARED_OVERLAP} --moe-shared-expert-gate {RECOMPUTE_MOE} "
        "--global-batch-size 16",
        "slots=2 overlap_degree=2 rematerialize=true",
    ),
    "shared_expert_overlap_recomputed": Layout(
        4, 4, f"{RECOMPUTE} {SHARED_OVERLAP} --bf16", "slots=2 overlap_degree=3 schedule=s1"
    ),
    "dropping_recomputed_moe": Layout(
        4, 4, f"{DROPPING} {RECOMPUTE_MOE} {DISTRIBUTED}", "slots=2 overlap_degree=2 overlap=false nodes=2"
    ),
    "padded_to_capacity": Layout(
        4, 4, f"{PADDED} {NO_BIAS} --swiglu", "slots=2 overlap_degree=2", moves=False, replicates=False
    ),
    "copies_per_token_loss": Layout(
        4,
        2,
        f"--calculate-per-token-loss {OVERLAPS} --moe-router-topk 4 --clip-grad 0 --global-batch-size 32",
        "slots=2 overlap_degree=2 check_plans=true",
    ),
    "moe_every_other_layer_after_dense_ones": Layout(
        2,
        2,
        f"--num-layers 4 --moe-layer-freq ([0]*1+[1]+[0]+[1]) {DISTRIBUTED} --clip-grad 0",
        "slots=2 overlap_degree=2 calibrate=true profile_iterations=1",
    ),
    "measured_limits": Layout(
        4, 4, f"--swiglu {NO_BIAS} --global-batch-size 32", "profile_iterations=1", moves=False
    ),
    "measured_limits_copies_rematerialized": Layout(
        4,
        2,
        f"{OVERLAPS} {SHARED} {NO_BIAS} --calculate-per-token-loss",
        "profile_iterations=2 rematerialize=true calibrate=true",
        moves=False,
    ),
    "bf16_4_micro_batches_no_overlap": Layout(
        4,
        4,
        "--bf16 --global-batch-size 32 --moe-router-dtype fp32",
        "slots=2 overlap_degree=2 overlap=false",
    ),
    "fp16_loss_scaling": Layout(
        2, 2, f"--fp16 --initial-loss-scale 1024 {DISTRIBUTED}", "slots=2 overlap_degree=2"
    ),
    "groups_of_experts_sgd": Layout(
        2,
        2,
        f"{EXPERT_BIAS} --moe-router-num-groups 4 --moe-router-group-topk 2 "
        f"--optimizer sgd {NO_BIAS} --moe-z-loss-coeff 1e-3",
        "slots=2 overlap_degree=2 rematerialize=true",
    ),
    "one_expert_a_device_30_iterations": Layout(
        4,
        4,
        f"--num-experts 4 --swiglu {OVERLAPS} {NO_BIAS}",
        "slots=1 overlap_degree=1 check_plans=true",
        num_iterations=30,
        reshard_interval=3,
    ),
    "half_of_layers_recomputed_dropout": Layout(
        2,
        2,
        "--num-layers 4 --recompute-granularity full --recompute-method block --recompute-num-layers 2 "
        "--attention-dropout 0.1 --hidden-dropout 0.1 --moe-input-jitter-eps 0.01 --global-batch-size 16",
        "slots=2 overlap_degree=2 rematerialize=true",
    ),
    "allgather_dispatcher_weight_hashes": Layout(
        4,
        2,
        "--moe-token-dispatcher-type allgather --check-weight-hash-across-dp-replicas-interval 1",
        "slots=2 overlap_degree=2",
    ),
    "interleaved_not_aligned": Layout(
        4,
        2,
        f"{INTERLEAVED} {OVERLAPS} --no-align-grad-reduce --no-align-param-gather --global-batch-size 16",
        "slots=2 overlap_degree=2",
    ),
}


# Layouts that need the script of a Megatron-LM checkout; our script does not support them.
WITH_MEGATRONS_SCRIPT = {
    "multi_token_prediction_overlaps": Layout(
        2, 2, f"{MTP} {OVERLAPS} --global-batch-size 16", "slots=2 overlap_degree=2"
    ),
    "pipeline_multi_token_prediction_rematerialized": Layout(
        4,
        2,
        f"{PP2} {MTP} --swiglu {NO_BIAS} {RECOMPUTE}",
        "slots=2 overlap_degree=2 rematerialize=true",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in DEFAULT]
)
def test_losses_equal_stock_megatron(
    name: str, text_data: Path, tmp_path: Path, record_property: Record
) -> None:
    compare(DEFAULT[name], text_data, tmp_path, record_property)


@pytest.mark.parametrize("name", SLOW)
def test_plain_expert_parallelism_is_bitwise_stock_megatron(name: str, text_data: Path) -> None:
    layout = replace(DEFAULT[name], num_iterations=4)
    assert_bitwise_equal(*(_train(layout, strategy, text_data, GPT)[0] for strategy in ("ep", "none")))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_losses_equal_stock_megatron_in_more_layouts(
    name: str, text_data: Path, tmp_path: Path, record_property: Record
) -> None:
    compare(MORE[name], text_data, tmp_path, record_property)


@pytest.mark.slow
@pytest.mark.skipif(
    "MEGATRON_LM_PATH" not in os.environ, reason="needs a Megatron-LM checkout (MEGATRON_LM_PATH)"
)
@pytest.mark.parametrize("name", WITH_MEGATRONS_SCRIPT)
def test_losses_equal_stock_megatron_with_its_script(
    name: str, text_data: Path, tmp_path: Path, record_property: Record
) -> None:
    script = Path(os.environ["MEGATRON_LM_PATH"]) / "pretrain_gpt.py"
    compare(WITH_MEGATRONS_SCRIPT[name], text_data, tmp_path, record_property, replace(GPT, script=script))


def compare(layout: Layout, data: Path, folder: Path, record: Record, model: Model = GPT) -> None:
    """Train under ``none``, ``ep`` and ``fssdp`` from one seed, and compare.

    Args:
        layout: What is trained how.
        data: Prefix of Megatron's indexed data.
        folder: For records.
        record: Takes what was measured.
        model: What is trained.
    """
    (stock, _), (ep, _) = _train(layout, "none", data, model), _train(layout, "ep", data, model)
    keys = f"{layout.settings} reshard_interval={layout.reshard_interval} record_dir={folder}".split()
    strategy = " ".join(["fssdp", *(f"--moe-strategy-set {key}" for key in keys)])
    fssdp, messages = _train(layout, strategy, data, model)
    assert len(stock.losses) == layout.num_iterations
    assert stock.losses[-1] < stock.losses[0]
    difference = relative_difference(_losses(fssdp), _losses(ep))
    norm_difference = _norm_difference(fssdp, ep)
    moved = sum("re-sharded" in message for message in messages)
    metrics = read_metrics(folder)
    replicas = [sum(layer.num_replicas for layer in entry.layers) for entry in metrics]
    record("fssdp", f"{difference:.1e}")
    record("fssdp_norm", f"{norm_difference:.1e}")
    record("reshards", moved)
    record("replicas", replicas)

    assert_bitwise_equal(ep, stock)
    # In half precision the parts of a replicated expert's gradient are rounded one by one.
    is_half = layout.is_bf16 or "--fp16" in layout.arguments
    assert difference <= (2e-3 if is_half else 1e-5)
    assert norm_difference <= (2e-2 if is_half else 1e-4)
    assert [entry.iteration for entry in metrics] == list(range(1, layout.num_iterations + 1))
    assert replicas[0] == 0, "replicas were planned without a history"
    assert any(replicas) == layout.replicates
    assert moved or not layout.moves


def _train(layout: Layout, strategy: str, data: Path, model: Model) -> tuple[TrainingRun, list[str]]:
    """The last rank's view, and the messages of all ranks."""
    arguments = (
        f"--expert-model-parallel-size {layout.ep} {layout.arguments} --train-iters {layout.num_iterations} "
        f"--moe-strategy {strategy}"
    )
    runs = train_on_all_ranks(layout.num_ranks, arguments, data, model=model)
    failed = next((run for run in runs if run.exit_code), None)
    assert failed is None, failed.errors[-3000:]
    return runs[-1], [message for run in runs for message in run.messages]


def assert_bitwise_equal(run: TrainingRun, to: TrainingRun) -> None:
    """Check that two trainings have exactly the same losses and gradient norms."""
    assert _losses(run) == _losses(to)
    assert run.grad_norms == to.grad_norms


def _losses(run: TrainingRun) -> tuple[float, ...]:
    return run.losses + run.other_losses


def _norm_difference(run: TrainingRun, to: TrainingRun) -> float:
    # Megatron computes the norm only for clipping.
    return relative_difference(run.grad_norms, to.grad_norms) if any(to.grad_norms) else 0.0
