"""The systems of Hecate's evaluation, on models of two layers that are simulated quickly."""

from dataclasses import replace

import pytest
from benchmarks.papers.hecate.hecate_runs import (
    BASELINES,
    EP,
    FLEXMOE_SLOTS,
    FLOPS_PER_S,
    HECATE,
    LONGER,
    MODELS,
    MOVES_AT,
    SETTLED,
    over_best,
    over_ep,
    setting_of,
)
from benchmarks.papers.hecate.hecate_trends import (
    IN_FIGURE_13,
    SAME_DEGREE,
    TIMES_LONGER,
    Change,
    hidden_experts,
    times_longer,
)
from benchmarks.papers.hecate.hecate_values import IMPLIED_SHARE
from benchmarks.papers.skews import SKEWS

from benchmarks.papers.setting import Setting


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


def test_fewer_experts_are_hidden_on_cluster_a_and_as_many_as_in_figure_13_on_b() -> None:
    sigma = SKEWS["hecate"].sigma
    on_a, on_b = (
        [hidden_experts(setting_of(model, cluster, sigma)) for model in MODELS]
        for cluster in ("hecate-a", "hecate-b")
    )
    assert on_b[0] == IN_FIGURE_13
    assert all(few < many for few, many in zip(on_a, on_b, strict=True))
    for model, degree in zip(MODELS, on_a, strict=True):  # the simulated limit is the same
        setting = small(model, 32)
        as_computed = HECATE.having(overlap_degree=degree).seconds(setting)
        assert HECATE.seconds(setting) == pytest.approx(as_computed)


def test_compute_outside_is_so_long_that_moe_layers_take_the_share_that_figures_10_and_11_imply() -> None:
    sigma, pace = SKEWS["hecate"].sigma, FLOPS_PER_S["hecate-b"]
    longer = times_longer(sigma)
    assert longer == pytest.approx(TIMES_LONGER, abs=0.05)
    setting = setting_of("GPT-MoE-S", "hecate-b", sigma, flops_per_s=(pace, pace / (LONGER * longer)))
    share = setting.moe_s_I("ep")[SETTLED:].mean() / EP.seconds(setting)
    assert share == pytest.approx(IMPLIED_SHARE, rel=1e-3)


def test_a_change_has_a_pair_for_every_draw_and_model_and_draws_differ() -> None:
    found = Change(num_draws=2).gains("hecate-a", 16, SKEWS["hecate"].sigma)
    assert len(found) == 2 * len(MODELS) == len(set(found))
    unchanged = [
        over_ep(setting_of(model, "hecate-a", SKEWS["hecate"].sigma, 16), HECATE) for model in MODELS
    ]
    assert found[: len(MODELS)] == unchanged


def test_cluster_a_gains_more_than_b_if_as_many_experts_are_replicated() -> None:
    pairs = SAME_DEGREE.slower_links(SKEWS["hecate"].sigma)
    assert all(on_a > on_b for on_a, on_b in pairs)
