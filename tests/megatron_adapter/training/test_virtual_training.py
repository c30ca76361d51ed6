"""Megatron's own training loop on four virtual CUDA devices: no findings, and the numbers of CPU ranks."""

import json
from collections import Counter
from dataclasses import dataclass

import pytest

from devtools.virtual_cuda.books.findings import Finding
from megatron_fssdp.testing import run_ranks
from tests.support.training_preload import VIRTUAL_PRELOAD

from .. import training_run
from ..training_run import GPT, Model, flags, relative_difference, rows
from .parity.test_strategy_parity import cheap_links

WORLD_SIZE = 4
# Parameters are drawn on the host, as the launcher has it on CPU ranks. Megatron moves them to the device
# only with the distributed optimizer.
VIRTUAL_GPT = Model(
    GPT.script,
    GPT.arguments.replace("--distributed-backend gloo", "")
    + " --num-layers 3 --disable-bias-linear --train-iters 3 --use-distributed-optimizer",
)
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 8000"
TP_PARTS = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2"
SEQUENCE_PARTS = f"{TP_PARTS} --sequence-parallel"
BESIDE = f"{{EP2}} {OVERLAP} --moe-shared-expert-gate --moe-shared-expert-intermediate-size 32 "
BESIDE += "--moe-shared-expert-overlap --disable-bias-linear"
COMBINED = f"{{EP2}} {OVERLAP} --bf16 --global-batch-size 16 --overlap-moe-expert-parallel-comm"
# Measured costs would select other replicas in every run.
FIXED = "fssdp slots=2 overlap_degree=4 reshard_interval=2"
ROUNDING = 1e-5

# name | arguments | strategy and its settings
TABLE = rows(
    """
    none | {EP2} {OVERLAP} | none
    fssdp rematerialized | {EP2} {OVERLAP} | fssdp rematerialize=true
    fssdp calibrated | {EP2} {OVERLAP} | fssdp planner=hecate
    fssdp in bf16 | {EP2} {OVERLAP} --bf16 | fssdp
    fssdp, everything recomputed | {EP2} --recompute-granularity full --recompute-method uniform
        --recompute-num-layers 1 | fssdp
    fssdp, MoE layers recomputed | {EP2} {RECOMPUTE_MOE} | fssdp
    prophet, split transfers | {EP2} {OVERLAP} | prophet
    fastermoe, smart schedule | {EP2} {OVERLAP} | fastermoe smart_schedule=true
    quota, each micro-batch | {EP2} {OVERLAP} | quota
    pipeline with overlap | {EP2} {PP2} --num-layers 4 {OVERLAP} | fssdp
    interleaved pipeline, split transfers | {EP2} {INTERLEAVED} {OVERLAP} | prophet
    tensor and sequence parallel | {EP2} {TP2} | fssdp
    experts' tensor parallel | {EP2} {SEQUENCE_PARTS} {OVERLAP} | fssdp
    parm, baseline | {EP2} {SEQUENCE_PARTS} | parm schedule=baseline
    parm, s1 | {EP2} {SEQUENCE_PARTS} | parm schedule=s1
    parm, s2 | {EP2} {SEQUENCE_PARTS} | parm schedule=s2
    shared experts beside the exchange | {BESIDE} | fssdp
    shared experts beside the exchange, sequence parallel | {BESIDE} {TP2} | fssdp
    shared experts beside the deduplicated exchange | {BESIDE} | fssdp exchange=deduplicated nodes=2
    shared experts beside parm's s1, recomputed | {BESIDE} {SEQUENCE_PARTS} {RECOMPUTE_MOE} | parm schedule=s1
    shared experts beside parm's s2 | {BESIDE} {TP_PARTS} | parm schedule=s2
    shared experts beside the smart schedule | {BESIDE} | fastermoe smart_schedule=true
    combined 1F1B schedule, re-shards | {COMBINED} --global-batch-size 32 --train-iters 5 | {FIXED}
    combined 1F1B schedule, rematerialized | {COMBINED} | fssdp rematerialize=true
    combined 1F1B schedule, split transfers | {COMBINED} | prophet
    combined 1F1B schedule, each micro-batch | {COMBINED} | quota
    combined 1F1B schedule, deduplicated exchange | {COMBINED} | fssdp exchange=deduplicated nodes=2
    combined 1F1B schedule, smart schedule | {COMBINED} | fastermoe smart_schedule=true
    combined 1F1B schedule, parm's s1 | {COMBINED} {SEQUENCE_PARTS} | parm schedule=s1
    deduplicated exchange, MoE layers recomputed | {EP2} {OVERLAP} {RECOMPUTE_MOE}
        | fssdp exchange=deduplicated
    deduplicated exchange, each micro-batch, pipeline | {EP2} {PP2} --num-layers 4
        | quota exchange=deduplicated
    re-shards in an interleaved pipeline | {EP2} {INTERLEAVED} {OVERLAP} --train-iters 5 | {FIXED}
    evaluation | {EP2} {OVERLAP} --log-interval 1 --split 90,10,0 --eval-iters 1 --eval-interval 2 | fssdp
    tokens divided over tensor-parallel ranks | {EP2} --tensor-model-parallel-size 2 {OVERLAP} | fssdp
    topology-aware gate | {EP2} {OVERLAP} | fastermoe router=topology_aware leaving_share=0.3 nodes=4
    a loader's own processes and thread | {EP2} --num-workers 1 | fssdp
    """,
    **{"OVERLAP": OVERLAP, "TP_PARTS": TP_PARTS, "SEQUENCE_PARTS": SEQUENCE_PARTS, "BESIDE": BESIDE},
    **{"COMBINED": COMBINED, "FIXED": FIXED},
)
CASES = {name: f"{arguments} {flags(strategy)}" for name, (arguments, strategy) in TABLE.items()}
# Costs are measured in the first two iterations, and then select placements; the sums of other placements
# round differently.
MEASURED = dict.fromkeys(("fssdp", "prophet", "fastermoe", "flexmoe", "smartmoe", "quota", "auto"), "{EP2}")
MEASURED["flexmoe under pipeline stages"] = "{EP2} {PP2} --num-layers 4"


@dataclass(frozen=True)
class VirtualRun:
    """What one rank saw of a training on a virtual device: findings but for known ones, and log entries."""

    training: training_run.TrainingRun
    findings: tuple[Finding, ...]
    host_syncs: dict[str, int]
    counts: dict[str, int]


def train_virtually(arguments, data, before=None, num_ranks=WORLD_SIZE):
    """As ``train_on_all_ranks``, on virtual devices with NCCL as Megatron's backend."""
    arguments, variables = training_run.without_variables(arguments)
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "MEGATRON_FSSDP_DEVICE": "cuda"}
    environment |= {"LOCAL_WORLD_SIZE": str(num_ranks), **variables}
    argv = training_run.command_line(VIRTUAL_GPT, arguments, data)
    runs = run_ranks(train_on_device, num_ranks, argv, before, env=environment, preload=VIRTUAL_PRELOAD)
    for rank, run in enumerate(runs):
        assert not run.training.exit_code, f"rank {rank}:\n{run.training.errors[-3000:]}"
        assert run.counts["operator"] > 0  # on the CUDA branches
    return runs


def train_on_device(rank, world_size, argv, before):
    from devtools.virtual_cuda.programs.known_findings import explained
    from devtools.virtual_cuda.programs.megatron_loop import megatron_on_virtual_cuda
    from megatron_fssdp.megatron_adapter.cpu import cpu_runtime

    with megatron_on_virtual_cuda() as device:
        training = training_run.train_on_rank(rank, world_size, argv, before, True)
        device.finish_all()
    assert not cpu_runtime._installed
    unknown, _ = explained(device.findings)
    host_syncs = Counter(f"{sync.name} at [{sync.place}]" for sync in device.host_syncs)
    return VirtualRun(training, tuple(unknown), dict(host_syncs), dict(device.counts))


def train_on_cpu(arguments, data):
    arguments = f"{arguments} --distributed-backend gloo"
    return training_run.train_on_all_ranks(WORLD_SIZE, arguments, data, model=VIRTUAL_GPT)


def assert_clean(runs):
    for rank, run in enumerate(runs):
        assert not run.findings, f"rank {rank}:\n" + "\n".join(map(str, run.findings))


def assert_same_without_findings(arguments, data, *, tolerance=None):
    """Train on virtual devices and on CPU ranks: no findings; equal bits, or losses within a tolerance."""
    runs, wanted = train_virtually(arguments, data), train_on_cpu(arguments, data)
    assert_clean(runs)
    assert wanted[-1].losses
    for run, on_cpu in zip(runs, wanted, strict=True):
        got = run.training
        if tolerance is None:
            assert (got.losses, got.grad_norms) == (on_cpu.losses, on_cpu.grad_norms)
        elif on_cpu.losses:
            assert relative_difference(got.losses, on_cpu.losses) <= tolerance
    return runs


def test_megatron_trains_on_virtual_devices_like_on_cpu_ranks(text_data):
    """One training with pipeline stages, the distributed optimizer and both overlap flags."""
    arguments = f"{{EP2}} {OVERLAP} --num-layers 2 --train-iters 2 --moe-strategy prophet"
    runs = assert_same_without_findings(arguments, text_data)
    for run in runs:
        assert run.counts["P2P batch"] > 0
        assert run.counts["stream made"] > 1
        # Where Megatron itself does not wait, the plugin's loop waits once in each of 2 iterations for the
        # counts, when the optimizer has stepped, once more in the first one, in which no rank knows yet how
        # many counts the others have, and once for plans, before the passes of the second one.
        ours = {place for place in run.host_syncs if "runtime/" in place and "[megatron/" not in place}
        waits = Counter({place: run.host_syncs[place] for place in ours})
        assert sorted(waits.values()) == [1, 1, 2], waits
        assert all("moe_runtime.py" in place or "layer_planner.py" in place for place in waits), waits
        # Megatron's dispatcher waits once for each of 2 layers in each of 2 iterations.
        waits = Counter({place: n for place, n in run.host_syncs.items() if "token_dispatcher.py" in place})
        assert waits.total() == 2 * 2, waits


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_has_no_findings_and_the_numbers_of_cpu_ranks(case, text_data):
    assert_same_without_findings(CASES[case], text_data)


@pytest.mark.slow
def test_combined_schedule_of_interleaved_stages_has_the_findings_of_stock_megatron(text_data):
    """Megatron's messages between stages use memory of other streams. The strategy must not add findings."""
    arguments = f"{COMBINED} {{INTERLEAVED}}"
    stock, ours = (
        train_virtually(f"{arguments} --moe-strategy {strategy}", text_data) for strategy in ("none", "fssdp")
    )
    for run, of_stock in zip(ours, stock, strict=True):
        known = {finding.lines for finding in of_stock.findings}
        assert not [str(finding) for finding in run.findings if finding.lines not in known]
    on_cpu = train_on_cpu(f"{arguments} --moe-strategy fssdp", text_data)
    assert ours[-1].training.losses == on_cpu[-1].losses


@pytest.mark.slow
@pytest.mark.parametrize("case", MEASURED)
def test_training_by_measured_costs_has_no_findings(case, text_data):
    chosen = flags(f"{case.split()[0]} FSSDP_PROFILE_ITERATIONS=2")
    arguments = f"{MEASURED[case]} {OVERLAP} --train-iters 5 {chosen}"
    assert_same_without_findings(arguments, text_data, tolerance=ROUNDING)


def test_sums_of_resident_replicas_wait_for_the_gradients_of_ddp(text_data):
    """DDP adds gradients on a stream of its own, and the sums over the holders of an expert read them."""
    chosen = flags("flexmoe placement_interval=1 window=1 FSSDP_PROFILE_ITERATIONS=1")
    arguments = f"{{EP2}} --num-layers 2 --train-iters 2 {chosen}"
    runs = train_virtually(arguments, text_data, cheap_links, num_ranks=2)
    assert any("[fssdp] resident replicas: " in message for message in runs[0].training.messages)
    assert_clean(runs)


@pytest.mark.slow
def test_a_saved_and_recorded_training_goes_on_with_the_same_numbers(text_data, tmp_path):
    """Owners moved before the checkpoint. Virtual devices and CPU ranks go on from it alike."""
    common = f"{{EP2}} {OVERLAP} --train-iters 5 --ckpt-format torch_dist"
    folder, record = tmp_path / "checkpoint", tmp_path / "record"
    saving = f"{common} {flags(FIXED, record_dir=record)} --save {folder} --save-interval 3"
    runs = train_virtually(saving, text_data)
    assert_clean(runs)
    # The recorder's branches for CUDA: synchronized times and the peak of the device's memory.
    assert json.loads((record / "metrics.jsonl").read_text().splitlines()[0])["rank_memory"] == "allocated"
    assert any("training_hooks.py" in place and "device.synchronize" in place for place in runs[0].host_syncs)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    loading = f"{common} {flags(FIXED)} --load {folder}"
    resumed = train_virtually(loading, text_data)
    assert_clean(resumed)
    assert resumed[-1].training.losses == runs[-1].training.losses[3:]
    assert train_on_cpu(loading, text_data)[-1].losses == resumed[-1].training.losses
