"""Settings and relations of the papers' tables: loads under FasterMoE's gate, ZeRO's volume, figures."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from benchmarks.papers.hecate.hecate_values import IMPLIED_SHARE
from benchmarks.papers.in_short import IN_SHORT
from benchmarks.papers.paper_page import file_name, paper_page
from benchmarks.papers.paper_rows import PAPERS, Row, count, module_of, spread_of_paper, words
from benchmarks.papers.skews import SKEWS, share_of_top, spread_of

from benchmarks.papers.claims import Answer, Claim
from benchmarks.papers.fastermoe import fastermoe_statements as fastermoe
from benchmarks.papers.fastermoe import fastermoe_systems as systems
from benchmarks.papers.hecate import hecate_statements as hecate
from benchmarks.papers.parm import parm_statements as parm
from benchmarks.papers.pro_prophet import pro_prophet_model
from benchmarks.papers.pro_prophet import pro_prophet_statements as pro_prophet
from benchmarks.papers.setting import Model, Relation, Setting, is_near, kept_in_nodes
from benchmarks.reproduce_papers import main, rows_of
from megatron_fssdp.planning.placement.topology import Topology

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("leaving_share", [0.0, 0.2, 1.0])
def test_the_gate_keeps_tokens_beyond_the_allowed_number_in_their_node(leaving_share: float) -> None:
    rng = np.random.default_rng(0)
    counts_ILDE = rng.multinomial(1000, np.arange(1, 9) / 36, size=(3, 2, 4))
    found = kept_in_nodes(counts_ILDE, Topology.uniform(4, 2), leaving_share)
    assert np.abs(found.sum(axis=-1) - 1000).max() <= 4  # rounding
    for device, near in ((0, slice(0, 4)), (3, slice(4, 8))):
        away = 1000 - found[:, :, device, near].sum(axis=-1)
        wanted = 1000 - counts_ILDE[:, :, device, near].sum(axis=-1)
        assert (np.abs(away - np.minimum(wanted, 1000 * leaving_share)) <= 4).all()


def test_sources_without_near_tokens_spread_evenly() -> None:
    counts_ILDE = np.array([[[[0, 0, 6, 2]] * 2]])
    found = kept_in_nodes(counts_ILDE, Topology.uniform(2, 2), 0.25)
    assert found[0, 0, 0].tolist() == [3, 3, 2, 0]  # 2 of 8 tokens can leave: 1.5 and 0.5, rounded to even
    assert found[0, 0, 1].tolist() == [0, 0, 6, 2]


def test_seconds_of_zero_equal_those_worked_out_by_hand() -> None:
    """Stage 3 moves all experts but its own three times; stage 2 twice, once beside the backward pass."""
    setting = Setting(Model(256, 128, 2), "johnny", 1.0, 16, 16, 2, 1, precision="fp32")
    job, cluster = setting.job, setting.description
    assert job.expert_bytes == 4 * job.expert_elements
    forward_s = (128 * 2) * job.expert_flops_per_token / cluster.expert_flops_per_s
    moved_s = 15 * job.expert_bytes / cluster.inter_node.bandwidth_bytes_per_s
    assert systems.zero_s(setting, 3) == pytest.approx(2 * (3 * forward_s + 3 * moved_s))
    assert systems.zero_s(setting, 2) == pytest.approx(2 * (forward_s + moved_s + moved_s))
    assert systems.zero_s(setting, 2) < systems.zero_s(setting, 1) < systems.zero_s(setting, 3)


def test_parallelisms_lie_in_the_roofline_where_figure_5_has_them() -> None:
    """§3.3: data parallelism has the poorest ratio; overlap lifts it above the semi-ideal curve."""
    setting = systems.setting_of("MoE-GPT", 0.0)
    places = systems.data_and_model_parallelism(setting)
    data, hidden, model = places.values()
    # α·H / B: 2 · 2048 over the 2 · 1024 pairs that a device computes.
    assert model.ratio == pytest.approx(data.ratio * 2)
    for place in (data, model):
        assert place.share_of_peak == pytest.approx(place.ratio / (1 + place.ratio)), "semi-ideal, Eq. 6"
    assert data.share_of_peak < hidden.share_of_peak <= min(1.0, hidden.ratio), "at most ideal, Eq. 5"
    experts = systems.place_of(systems.FASTMOE, setting)
    assert experts.ratio > model.ratio, "expert parallelism communicates least"


def test_a_layer_alone_has_the_loads_that_it_has_in_the_model() -> None:
    whole = Setting(Model(128, 64, 3), "johnny", 1.5, 16, 16, 2, 1, num_iterations=4, precision="fp32")
    alone = [dataclasses.replace(whole, layer=layer) for layer in range(3)]
    tokens = [setting.run("ep").tokens_ILD for setting in (whole, *alone)]
    assert np.array_equal(tokens[0], np.concatenate(tokens[1:], axis=1))
    assert whole.moe_s("ep") == pytest.approx(sum(setting.moe_s("ep") for setting in alone))


def test_the_bound_of_figure_12_is_that_of_each_pass() -> None:
    """Forward has half the backward's compute, so both all-to-alls are hidden in at most one pass."""
    found, bounds = systems.of_layers(SKEWS["fastermoe"].sigma)
    assert len(found) == len(bounds) == 12 + 12 + 24 + 24
    assert (found <= bounds).all()
    assert bounds.max() <= 7 / 4 + 1e-6


def test_spreads_have_the_shares_that_the_papers_state() -> None:
    assert spread_of(share_of_top(4), 16, 0.80) == pytest.approx(1.85, abs=0.01)
    assert spread_of(share_of_top(4), 16, 4 * 0.196) == pytest.approx(SKEWS["fastermoe"].sigma, abs=0.02)

    def in_most_layers(share: np.ndarray) -> float:
        return float(np.quantile(share[:, :3].sum(axis=1), 0.25))

    assert spread_of(in_most_layers, 16, 0.50) == pytest.approx(SKEWS["pro-prophet"].sigma, abs=0.01)


def test_every_relation_has_limits_and_a_value_or_a_reason() -> None:
    for paper in (hecate, fastermoe, pro_prophet, parm):
        names = [(relation.where, relation.what) for relation in paper.RELATIONS]
        assert len(set(names)) == len(names)
        for relation in paper.RELATIONS:
            assert 0 < relation.low <= relation.high
            assert (relation.simulated is None) == bool(relation.why_not)


def test_every_relation_of_parm_can_be_simulated() -> None:
    """The terms are counts, Fig. 1, extremes, 48 cells, assumptions, Fig. 7 and the text, and Table V."""
    simulated = [relation for relation in parm.RELATIONS if relation.simulated is not None]
    assert len(simulated) == 2 + 5 + 1 + 4 * 4 * 3 + 10 + 1 + 3 + 4 + 4 * 3 + 4
    for relation in simulated:
        if not relation.what.startswith("cells"):  # tests/benchmarks/test_parm.py checks two of the cells
            values = relation.simulated(0.0)
            assert min(values) > 0
            assert relation.explained or not relation.counts or is_near(relation.ratio(values))


def test_pro_prophet_beats_expert_parallelism_in_one_cell_of_table_v() -> None:
    """One cell of Pro-Prophet's Table V, at a size that is simulated quickly."""
    small = Setting(Model(512, 64, 1), "lpwnv", 1.0, 8, 8, 1, 1, num_iterations=5)
    assert small.description.num_nodes == 2
    plain, prophet = small.iteration_s("ep"), small.iteration_s("prophet")
    assert 0 < prophet <= plain * 1.001
    assert small.moe_s("ep") < plain
    assert len(pro_prophet.RELATIONS) == 5 + 4 + 3 * (10 + 8) + 1 + 2 + 1 + 8 + 4 + 2 + 4


def test_pro_prophets_equations_know_compute_but_not_which_link_tokens_take() -> None:
    """Eq. 2 equals the simulator. In Eq. 1, a node's link is too fast and a device's share too slow."""
    setting = Setting(Model(1024, 1024, 2), "hpwnv", 1.25, 16, 16, 2, 1, num_iterations=5)
    for bandwidth, is_slower in (("a device's share", True), ("a node's link", False)):
        found = pro_prophet_model.compared(setting, bandwidth)
        assert all(len(pairs) for pairs in found.values())
        modelled_s, simulated_s = found["EC"].T
        assert modelled_s == pytest.approx(simulated_s)
        modelled_s, simulated_s = found["A2A"].T
        assert ((modelled_s > simulated_s) == is_slower).all()


def test_what_stands_beside_a_row_is_shown_even_if_the_row_is_near() -> None:
    relation = Relation("Table 1", "speed-up", 2, 2, lambda _: [2.1], beside=lambda _: "even loads: 2.5")
    assert Row(relation, [2.1], "even loads: 2.5").note == "even loads: 2.5"
    assert Row(relation, [9.0], "even loads: 2.5").note == "even loads: 2.5; open"


def test_a_claim_says_why_only_where_it_does_not_hold_in_all_cases() -> None:
    def pairs(_: float) -> list[tuple[float, float]]:
        return [(3.0, 2.0), (1.0, 2.0), (2.0, 2.0)]

    claim = Claim("§1", "the first is faster", pairs, "the others wait")
    assert Answer(claim, pairs(0)).cells[2:] == ("1 of 3", "0.50–1.50", "the others wait")
    assert Answer(claim, pairs(0)[:1]).cells[2:] == ("1 of 1", "1.50–1.50", "")


@pytest.mark.parametrize("key", PAPERS)
def test_main_statements_are_rows_that_are_simulated(key: str) -> None:
    by_place = {(relation.where, relation.what): relation for relation in module_of(key).RELATIONS}
    for place in IN_SHORT[key]:
        assert by_place[place].counts


def test_hecates_share_of_moe_layers_gives_the_papers_speedup() -> None:
    """With this share, layers that are 11.87 times as fast make an iteration 1.70 times as fast."""
    assert pytest.approx(1.70) == 1 / (1 - IMPLIED_SHARE + IMPLIED_SHARE / 11.87)


def shipped(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_a_papers_page_has_a_row_for_every_statement_and_says_why_one_is_missed() -> None:
    rows = rows_of("parm", spread_of_paper("parm"))
    text = paper_page("parm", rows)
    assert count(rows)[0] >= 60
    missed = [line for line in text.splitlines() if line.startswith("|") and "**" in line]
    assert len(missed) == count(rows)[1] - count(rows)[0]
    assert min(len(line.split(" | ")[-1].strip(" |")) for line in missed) > 10
    assert text == shipped(file_name("parm")), "run `python benchmarks/reproduce_papers.py --pages docs`"
    for row in rows:
        assert f"| {row.relation.where} | {row.relation.what} |" in text


@pytest.mark.parametrize("key", PAPERS)
def test_the_shipped_pages_are_those_of_the_statements(key: str) -> None:
    """Papers that take long to simulate: all but the simulated values is compared."""
    module, text = module_of(key), shipped(file_name(key))
    found = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| .+? \| .+? \| .*\|$", text, re.MULTILINE)
    wanted = [(one.where, one.what, words([one.low, one.high])) for one in module.RELATIONS]
    assert found[2:] == wanted, "run `python benchmarks/reproduce_papers.py --pages docs`"
    for claim in getattr(module, "CLAIMS", ()):
        assert f"| {claim.where} | {claim.statement} |" in text
    assert f"(pictures/papers_{key}.svg)" in text
    assert (DOCS / "pictures" / f"papers_{key}.svg").is_file()


def test_the_entry_page_and_the_pages_of_the_papers_have_the_same_counts() -> None:
    entry, near, total = shipped("papers.md"), 0, 0
    for key, name in PAPERS.items():
        page = re.search(rf"\*\*(\d+) of (\d+) numbers of {name} ", shipped(file_name(key)))
        assert page is not None
        assert f"| [{name}]({file_name(key)}) | {page[1]} of {page[2]} |" in entry
        near, total = near + int(page[1]), total + int(page[2])
    assert f"**{near} of {total} numbers of the four papers " in entry


@pytest.mark.parametrize("option", [["--paper", "parm"], ["--sigma", "1"]])
def test_pages_are_only_written_for_all_papers_with_their_own_spreads(
    option: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["reproduce_papers.py", "--pages", str(tmp_path), *option])
    with pytest.raises(SystemExit):
        main()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", PAPERS)
def test_every_figure_that_is_not_reproduced_has_a_reason(key: str) -> None:
    assert all(reason for reason in module_of(key).NOT_REPRODUCED.values())


@pytest.mark.parametrize("key", PAPERS)
def test_assumptions_belong_to_figures_that_have_rows(key: str) -> None:
    module = module_of(key)
    figures = {relation.where.split(",")[0] for relation in module.RELATIONS}
    assert set(getattr(module, "ASSUMED", {})) <= figures
