"""Parm's testbeds and layers worked out by hand, and relations that hold for all layers."""

import itertools

import pytest

from benchmarks.papers import parm
from benchmarks.papers.claims import NEAR, of_paper, stated
from benchmarks.papers.parm_layers import (
    ALL_PAIRS,
    COLUMNS,
    ConfiguredLayer,
    cell_of,
    layer_on,
    layers_of,
    scheduled_seconds,
)
from benchmarks.papers.parm_testbeds import AS_TAKEN, Assumptions, Span, Testbed, spans_of
from megatron_fssdp.planning.cost.tensor_schedules import SCHEDULES, ScheduledLayer

B_32 = Testbed("parm-b", 32)


def test_the_tables_have_as_many_layers_as_the_paper() -> None:
    counts = {which: len(list(layers_of(which))) for which in ("smaller half", "all", "square")}
    assert counts == {"smaller half": 81, "all": 162, "square": 54}
    kept, largest = set(layers_of("smaller half")), ConfiguredLayer(8, 2048, 1024, 4096, 2.4)
    assert ConfiguredLayer(2, 512, 4096, 4096, 2.4) in kept
    assert largest not in kept


def test_groups_lie_on_the_stated_nodes() -> None:
    """With 4 GPUs a node, an ESP group lies in one node; an EP group has a rank there for each ESP group."""
    near = {"mp": Span(2, 2), "esp": Span(2, 2), "ep": Span(16, 2), "ep_esp": Span(32, 4)}
    assert spans_of(2, 2, 32, 4) == near
    assert spans_of(4, 4, 8, 4)["ep"] == Span(2, 1)
    assert spans_of(4, 4, 8, 8)["ep"] == Span(2, 2)


def test_link_rates_follow_from_the_published_beta() -> None:
    """A link sends 4 bytes in 0.714 ns. A ring of 4 sends 3 of 4 parts; a gather among 2 sends half."""
    assert B_32.link_bytes_per_s == pytest.approx(4.2017e9, rel=1e-4)
    assert B_32.costs(4, 4)["all_gather", "mp"].beta_s_per_byte == pytest.approx(7.14e-10 / 4)
    assert B_32.costs(2, 4)["all_gather", "mp"].beta_s_per_byte == pytest.approx(7.14e-10 / 4 * 2 / 3)
    # A ring of 4 has three steps, as the published one; a pair has one, and 32 ranks have 31.
    assert B_32.costs(2, 4)["all_gather", "mp"].alpha_s == pytest.approx(1.09e-4 / 3)
    assert B_32.costs(2, 4)["all_to_all", "ep_esp"].alpha_s == pytest.approx(1.09e-4 * 31 / 3)
    # One rank of eight in a node: 7/8 of what each of four GPUs sends passes the NIC.
    assert B_32.costs(4, 4)["all_to_all", "ep"].beta_s_per_byte == pytest.approx(4 * 7 / 8 / 12.5e9)


def test_seconds_of_one_layer_equal_those_worked_out_by_hand() -> None:
    """B = 2, L = 512, H = M = 2048, f = 1.2 with N_MP = 4, N_ESP = 2 on 32 GPUs."""
    scheduled, ffn_size = layer_on(ConfiguredLayer(2, 512, 1024, 1024, 1.2), 4, 2, B_32)
    assert (scheduled.n_ep, ffn_size) == (16, 2048)
    x, rows = 1024 * 2048 * 4, 1.2 * 1024 * 2048 * 4
    y = 2 * rows
    index = list(layers_of("square")).index(ConfiguredLayer(2, 512, 1024, 1024, 1.2))
    found = cell_of("T-B 32", (4, 2))[index]

    alpha, link, nic = 1.09e-4, 0.75 * 4 / 7.14e-10, 12.5e9 / 4
    exchange = alpha * 15 / 3 + y * (7 / 8) / nic  # 16 ranks, and a fit among 4
    gather, reduce = alpha / 3 + 2 * x / 2 / link, 2 * alpha / 3 + y / link
    assert found.baseline.communication_s == pytest.approx(2 * (gather + reduce + 2 * exchange))
    parted = alpha * 31 / 3 + y / 4 * (7 / 8) / nic
    assert found.s1.communication_s == pytest.approx(2 * (2 * parted + alpha + 0.75 * x / link))
    # SAA: the GPUs' links carry 31/32 of y / 4 and 3/4 of the rows; the NIC finishes before them.
    both = alpha * 31 / 3 + alpha + (y / 4 * (31 / 32) + 0.75 * rows) / link
    assert found.s2.communication_s == pytest.approx(2 * (parted + both))
    forward = 1.2 * 1024 * 4 * 2048 * 2048 / (0.9 * 13.45e12)
    assert found.baseline.compute_s == pytest.approx(3 * forward)
    assert found.s1.compute_s == found.s2.compute_s == pytest.approx(3 * forward / 4)


def test_s1_and_s2_are_faster_than_the_baseline_for_every_layer() -> None:
    for layer in itertools.chain.from_iterable(
        cell_of(*cell) for cell in itertools.product(COLUMNS, ALL_PAIRS)
    ):
        assert max(layer.s1.total_s, layer.s2.total_s) < layer.baseline.total_s
        assert layer.parm.total_s == min(layer.s1.total_s, layer.s2.total_s)
        # The same all-to-alls, and a gather of k·f > 1 times as much: without SAA S2 has nothing to gain.
        assert max(layer.s1.total_s, layer.s2.total_s) <= layer.s2_in_turn.total_s


def test_all_but_two_cells_of_table_iv_are_close_to_the_papers() -> None:
    cells = [claim for claim in of_paper("parm") if claim.quantity == "cell"]
    missed = {
        (one.settings["schedule"], one.settings["column"])
        for one in cells
        if abs(parm.cell(0.0, **one.settings) / one.low - 1) > NEAR
    }
    assert missed == {("s2", "T-B 16"), ("s1", "T-B 32")}
    assert len(cells) == 48 == parm.num_near(0.0) + 2


def test_the_slowdown_on_testbed_a_is_the_one_that_table_v_gives() -> None:
    """The one calibrated number: Parm's milliseconds of BERT-Base in MoE layers on T-A."""
    published = stated("parm", "iteration_ms", model="BERT-Base", column="T-A", schedule="parm")
    published -= parm.published_outside_ms("BERT-Base", "T-A")
    assert 1e3 * parm.moe_s("T-A", "parm") == pytest.approx(published, rel=0.01)
    for model in parm.VOCABULARY:  # both models have the same tokens: Tables IV and V leave the same time
        assert parm.published_outside_ms(model, "T-A") == pytest.approx(203, abs=0.5)
        assert parm.published_outside_ms(model, "T-B 32") == pytest.approx(316, abs=3.5)


def test_compute_outside_moe_layers_takes_the_time_worked_out_by_hand() -> None:
    """8 M² + 4 L·M FLOPs of attention and 2 M·V of logits a token, divided by 4, counted three times."""
    flops_per_s = AS_TAKEN.share_of_peak * 82.6e12
    logits = 3 * 4096 * 2 * 768 * 30522 / 4 / flops_per_s
    attention = 3 * 4096 * (8 * 768**2 + 4 * 512 * 768) / 4 / flops_per_s
    all_reduce = 2 * (2 * 6.64e-4 + 2 * 5.38e-10 * 4096 * 768)
    wanted_s = logits + 12 * (attention + all_reduce)
    assert parm.outside_ms(0.0, "BERT-Base", "T-A") == pytest.approx(1e3 * wanted_s)


def test_a_single_rank_only_computes_and_schedules_do_not_always_pay_without_esp() -> None:
    alone = ScheduledLayer(num_tokens=8, hidden_size=16, num_rows=10)
    for schedule in SCHEDULES:
        found = scheduled_seconds(schedule, alone, {}, 100.0, 50.0)
        assert (found.communication_s, found.compute_s) == (0.0, 60.0)
    # Without ESP the baseline is two all-to-alls. With equal start-ups, S1's gather adds 0.66 ms on T-A.
    equal = Assumptions(startups="equal", slowdown_of_all_to_all=1.0)
    speedups = [layer.speedup("parm") for layer in cell_of("T-A", (2, 1), equal)]
    assert min(speedups) < 1 < max(speedups)
