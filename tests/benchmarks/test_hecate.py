"""The systems of Hecate's evaluation, on models of two layers that are simulated quickly."""

from dataclasses import replace

import pytest

from benchmarks.papers.hecate.hecate_runs import (
    BASELINES,
    EP,
    FLEXMOE_SLOTS,
    HECATE,
    MOVES_AT,
    SETTLED,
    over_best,
    over_ep,
    setting_of,
)
from benchmarks.papers.setting import Setting
from benchmarks.papers.skews import SKEWS


def small(model: str, devices: int, **others: object) -> Setting:
    setting = setting_of(model, "hecate-a", SKEWS["hecate"].sigma, devices, **others)
    return replace(setting, model=replace(setting.model, layers=2))


def test_hecate_is_faster_than_the_best_baseline_as_in_the_paper() -> None:
    """The paper's direction (Fig. 9), with the model whose figures the paper shows most."""
    assert over_best([small("GPT-MoE-S", 16)]) > 1
    assert over_best([small("GPT-MoE-S", 32)]) > 1


def test_seconds_of_a_move_are_spread_over_the_papers_interval() -> None:
    setting = small("GPT-MoE-S", 16)
    outcome = HECATE.outcome(setting)
    moves_s = outcome.parts_s["re-sharding"]
    assert (moves_s[[6, 12, 18]] > 0).any()
    num_moves = len(range(SETTLED, setting.num_iterations, MOVES_AT))
    rest_s = (outcome.iteration_s - moves_s)[SETTLED:].mean()
    assert HECATE.seconds(setting) == pytest.approx(rest_s + moves_s[SETTLED:].sum() / num_moves / 100)
    assert EP.seconds(setting) == pytest.approx(EP.outcome(setting).iteration_s[SETTLED:].mean())


def test_memory_of_flexmoe_is_that_of_the_paper() -> None:
    """1.83 times Hecate's, which is 1.64 times EP's (§5.3)."""
    owned = 2
    assert (owned + FLEXMOE_SLOTS) / owned == pytest.approx(1.83 * 1.64, rel=0.01)


def test_longer_compute_hides_more_experts_and_a_setting_can_leave_the_throughput_to_the_cluster() -> None:
    paced, plain = small("GPT-MoE-S", 32), small("GPT-MoE-S", 32, flops_per_s=None)
    assert plain.description.expert_flops_per_s > paced.description.expert_flops_per_s
    assert paced.description.expert_flops_per_s > paced.description.non_expert_flops_per_s
    held = [HECATE.outcome(one).memory.experts.replica_parameters_bytes for one in (paced, plain)]
    assert held[0] > held[1] > 0
    assert over_ep(paced, HECATE) > over_ep(plain, HECATE)
    assert set(BASELINES) == {"FasterMoE", "SmartMoE", "FlexMoE"}
