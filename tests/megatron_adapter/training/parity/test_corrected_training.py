"""Complete trainings in which replicas are added and dropped after the gate have the losses of plain EP."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.planning.placement.placement import ExpertPlacement
from megatron_fssdp.planning.transfer.transfer_plan import two_level_transfer
from megatron_fssdp.strategies.fssdp.corrected_plan import Correction, ExactCounts, ExpectedSeconds
from megatron_fssdp.strategies.layer_plan import LayerPlan

from ...training_run import TrainingRun, relative_difference, train_on_all_ranks
from .test_parity_matrix import INTERLEAVED, NO_BIAS, OVERLAPS, PP2, RECOMPUTE, RECOMPUTE_MOE

FOUR_MICRO_BATCHES = "--global-batch-size 16"
SETTINGS = "slots=2 profile_iterations=1 reshard_interval=2"
CASES = {
    "micro_batches_bf16": (4, 4, f"{OVERLAPS} --bf16 --global-batch-size 32 {NO_BIAS}", SETTINGS),
    "pipeline_recomputed": (4, 2, f"{PP2} {RECOMPUTE} {FOUR_MICRO_BATCHES}", f"{SETTINGS} check_plans=true"),
    "interleaved_rematerialized": (
        4,
        2,
        f"{INTERLEAVED} {OVERLAPS} --swiglu {NO_BIAS} {FOUR_MICRO_BATCHES}",
        f"{SETTINGS} rematerialize=true",
    ),
    "split": (2, 2, f"{RECOMPUTE_MOE} {FOUR_MICRO_BATCHES}", f"{SETTINGS} split=true"),
    "no_overlap": (4, 4, FOUR_MICRO_BATCHES, f"{SETTINGS} nodes=2 overlap=false dispatch_policy=balanced"),
    "unbound": (
        4,
        4,
        f"{OVERLAPS} {RECOMPUTE} {FOUR_MICRO_BATCHES}",
        f"{SETTINGS} nodes=2 dispatch_policy=unbound check_plans=true",
    ),
    "unbound_in_steps_rematerialized": (
        4,
        2,
        f"{PP2} {FOUR_MICRO_BATCHES}",
        f"{SETTINGS} nodes=2 dispatch_policy=unbound smart_schedule=true rematerialize=true",
    ),
    "unbound_deduplicated": (
        4,
        4,
        FOUR_MICRO_BATCHES,
        f"{SETTINGS} nodes=2 dispatch_policy=unbound exchange=deduplicated",
    ),
}


def draw_corrections() -> None:
    """Run on every rank before the launch: corrections are drawn from the counts, not decided by seconds."""
    ExactCounts.corrected = drawn_correction


def drawn_correction(exact: ExactCounts, planned: LayerPlan, expected: ExpectedSeconds | None) -> Correction:
    """A plan that drops some replicas and adds others, equal on all ranks."""
    rng = np.random.default_rng(int(exact.counts_DE.sum(axis=0) @ np.arange(exact.context.num_experts)))
    present_ED = planned.placement.present_ED & (rng.random(planned.placement.present_ED.shape) < 0.5)
    present_ED[np.arange(len(planned.placement.owner_E)), planned.placement.owner_E] = True
    for device in range(planned.placement.num_devices):
        free = exact.slots - int(
            ExpertPlacement(planned.placement.owner_E, present_ED).replicas_per_device_D[device]
        )
        absent = np.flatnonzero(~present_ED[:, device])
        present_ED[rng.permutation(absent)[:free], device] = True
    placement = ExpertPlacement(planned.placement.owner_E, present_ED, slots=exact.slots)
    dropped = int((planned.placement.present_ED & ~present_ED).sum())
    added = int((present_ED & ~planned.placement.present_ED).sum())
    logging.getLogger("megatron_fssdp").warning("corrected: %d added, %d dropped", added, dropped)
    transfer = two_level_transfer(placement, exact.context.topology)
    return Correction(replace(planned, placement=placement, transfer=transfer), 1.0, has_searched=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_equal_plain_expert_parallelism(name: str, text_data: Path) -> None:
    num_ranks, expert_parallel, arguments, settings = CASES[name]
    arguments = f"--expert-model-parallel-size {expert_parallel} {arguments} --train-iters 6"
    plain = _train(num_ranks, f"{arguments} --moe-strategy ep", text_data)
    keys = " ".join(f"--moe-strategy-set {key}" for key in settings.split())
    corrected = _train(num_ranks, f"{arguments} --moe-strategy fssdp {keys}", text_data)
    tolerance = 2e-3 if "--bf16" in arguments else 1e-5
    assert relative_difference(corrected.losses, plain.losses) <= tolerance
    corrections = [message for message in corrected.messages if message.startswith("corrected: ")]
    assert any(not message.startswith("corrected: 0 added") for message in corrections)
    assert any(not message.endswith(" 0 dropped") for message in corrections)


def _train(num_ranks: int, arguments: str, data: Path) -> TrainingRun:
    runs = train_on_all_ranks(num_ranks, arguments, data, before=draw_corrections)
    failed = next((run for run in runs if run.exit_code), None)
    assert failed is None, failed.errors[-3000:]
    return runs[-1]
