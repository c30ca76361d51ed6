"""The papers' claims and their pages: what a claim is, what its simulation assumes, and what is shipped."""

import importlib
import inspect
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers import fastermoe, hecate
from benchmarks.papers.claims import NEAR, PAPERS, SKEWS, Answer, answered, claims, count, of_paper, words
from benchmarks.papers.hecate_systems import EP, FLEXMOE_SLOTS, HECATE, MOVES_AT, SETTLED, setting_of
from benchmarks.papers.pages import PROSE, entry_page, file_name, paper_page
from benchmarks.papers.pro_prophet_equations import compared
from benchmarks.papers.setting import Model, Setting, kept_in_nodes, padded_counts
from benchmarks.reproduce_papers import main
from megatron_fssdp.planning.placement.topology import Topology

DOCS = Path(__file__).parents[2] / "docs"
REPRODUCE = "run `python benchmarks/reproduce_papers.py --pages docs`"


def test_claims_are_complete_and_their_quantities_exist() -> None:
    """Every claim has limits and a function that takes its settings, or a reason."""
    places = [(claim.paper, claim.where, claim.what) for claim in claims()]
    assert len(set(places)) == len(places) > 290
    for claim in claims():
        assert claim.kind in ("row", "input", "ours", "larger", "none")
        if claim.kind == "none":
            assert claim.note
            continue
        assert claim.kind == "larger" or 0 < claim.low <= claim.high
        assert (claim.kind == "ours") == (not claim.where) or claim.kind == "larger"
        module = importlib.import_module(f"benchmarks.papers.{claim.paper.replace('-', '_')}")
        padded = {"padded": True} if claim.padded else {}
        inspect.signature(getattr(module, claim.quantity)).bind(1.0, **claim.settings, **padded)
        for quantity in claim.beside.values():
            inspect.signature(getattr(module, quantity)).bind(1.0, **claim.settings)


def test_ratios_compare_geometric_means_and_only_rows_count() -> None:
    row = replace(claims()[0], kind="row", low=1.0, high=4.0)
    near, missed = Answer(row, [1.9, 2.0], [4.0], ""), Answer(row, [3.0], [], "")
    assert near.ratio() == pytest.approx(np.sqrt(1.9 * 2.0) / 2)
    assert near.is_near()
    assert not near.is_near(padded=True)
    assert count([near, missed, Answer(replace(row, kind="input"), [2.0], [], "")]) == (1, 2)
    assert count([near, missed], padded=True) == (0, 1)
    assert Answer(replace(row, kind="larger"), [(3.0, 2.0), (1.0, 2.0), (2.0, 2.0)], [], "").holds_in == 1


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


def test_padded_buffers_have_the_size_of_the_hottest_expert_of_any_rank() -> None:
    counts_ILDE = np.array([[[[5, 1], [2, 7]], [[1, 1], [3, 0]]]])
    assert padded_counts(counts_ILDE)[0].reshape(2, -1).tolist() == [[7] * 4, [3] * 4]
    setting = Setting(Model(128, 64, 2), "johnny", 1.5, 16, 16, 2, 1, num_iterations=4)
    padded = replace(setting, padded=True).run("ep").tokens_ILD
    assert (padded == padded[..., :1]).all()
    assert (padded.sum(axis=2) >= setting.run("ep").tokens_ILD.sum(axis=2)).all()


def test_seconds_of_zero_equal_those_worked_out_by_hand() -> None:
    """Stage 3 moves all experts but its own three times; stage 2 twice, once beside the backward pass."""
    setting = Setting(Model(256, 128, 2), "johnny", 1.0, 16, 16, 2, 1, precision="fp32")
    job, cluster = setting.job, setting.description
    forward_s = (128 * 2) * job.expert_flops_per_token / cluster.expert_flops_per_s
    moved_s = 15 * job.expert_bytes / cluster.inter_node.bandwidth_bytes_per_s
    assert fastermoe.zero_s(setting, 3) == pytest.approx(2 * (3 * forward_s + 3 * moved_s))
    assert fastermoe.zero_s(setting, 2) == pytest.approx(2 * (forward_s + moved_s + moved_s))


def test_a_layer_alone_has_the_loads_that_it_has_in_the_model() -> None:
    whole = Setting(Model(128, 64, 3), "johnny", 1.5, 16, 16, 2, 1, num_iterations=4, precision="fp32")
    alone = [replace(whole, layer=layer) for layer in range(3)]
    tokens = [setting.run("ep").tokens_ILD for setting in (whole, *alone)]
    assert np.array_equal(tokens[0], np.concatenate(tokens[1:], axis=1))
    assert whole.moe_s("ep") == pytest.approx(sum(setting.moe_s("ep") for setting in alone))


def test_pro_prophets_equations_know_compute_but_not_which_link_tokens_take() -> None:
    """Eq. 2 equals the simulator. In Eq. 1, a node's link is too fast and a device's share too slow."""
    setting = Setting(Model(1024, 1024, 2), "hpwnv", 1.25, 16, 16, 2, 1, num_iterations=5)
    for bandwidth, is_slower in (("a device's share", True), ("a node's link", False)):
        found = compared(setting, bandwidth)
        modelled_s, simulated_s = found["EC"].T
        assert modelled_s == pytest.approx(simulated_s)
        modelled_s, simulated_s = found["A2A"].T
        assert ((modelled_s > simulated_s) == is_slower).all()


def test_seconds_of_a_move_are_spread_over_hecates_interval() -> None:
    setting = setting_of("GPT-MoE-S", "hecate-a", SKEWS["hecate"], 16)
    setting = replace(setting, model=replace(setting.model, layers=2))
    outcome = HECATE.outcome(setting)
    moves_s = outcome.parts_s["re-sharding"]
    assert (moves_s[[6, 12, 18]] > 0).any()
    num_moves = len(range(SETTLED, setting.num_iterations, MOVES_AT))
    rest_s = (outcome.iteration_s - moves_s)[SETTLED:].mean()
    assert HECATE.seconds(setting) == pytest.approx(rest_s + moves_s[SETTLED:].sum() / num_moves / 100)
    assert EP.seconds(setting) == pytest.approx(EP.outcome(setting).iteration_s[SETTLED:].mean())


def test_hecates_assumptions_follow_from_its_numbers() -> None:
    """1.83 · 1.64 times EP's memory are 4 replicas beside 2 experts; 45 % turn 11.87 into 1.70."""
    assert pytest.approx(1.83 * 1.64, rel=0.01) == (2 + FLEXMOE_SLOTS) / 2
    share = hecate.IMPLIED_SHARE
    assert pytest.approx(1.70) == 1 / (1 - share + share / 11.87)
    assert hecate.hidden_experts(setting_of("GPT-MoE-S", "hecate-b", SKEWS["hecate"])) == 10  # Fig. 13
    assert hecate.times_longer(SKEWS["hecate"]) == pytest.approx(6.7, abs=0.05)


def shipped(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_the_shipped_page_of_parm_is_the_one_that_is_simulated() -> None:
    answers = [answered(claim, 0.0) for claim in of_paper("parm")]
    assert paper_page("parm", answers) == shipped(file_name("parm")), REPRODUCE
    for one in answers:  # a missed row says why
        assert one.claim.note or not one.counts or one.is_near()
    assert f"within {100 * NEAR:.0f} %" in entry_page({"parm": answers})


@pytest.mark.parametrize("paper", PAPERS)
def test_the_shipped_pages_are_those_of_the_claims(paper: str) -> None:
    """Papers that take long to simulate: all but the simulated values is compared."""
    text, entry = shipped(file_name(paper)), shipped("papers.md")
    for claim in of_paper(paper):
        stated = words([claim.low, claim.high]) if claim.low > 0 else ""
        cells = (claim.where or "(ours)", claim.what, stated) if claim.what else (claim.where, claim.note)
        assert "| " + " | ".join(cell for cell in cells if cell) + " |" in text, REPRODUCE
        assert f"| {claim.headline} |" in entry or not claim.headline
    counted = re.search(rf"\*\*(\d+) of (\d+) numbers of {PAPERS[paper]} ", text)
    assert counted is not None
    assert f"| [{PAPERS[paper]}]({file_name(paper)}) | {counted[1]} of {counted[2]} |" in entry
    assert f"(pictures/papers_{paper}.svg)" in text
    assert (DOCS / "pictures" / f"papers_{paper}.svg").is_file()


def test_the_prose_of_all_pages_is_short() -> None:
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in PROSE.glob("*.md")) <= 1500


def test_pages_are_only_written_for_all_papers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["reproduce_papers.py", "--pages", str(tmp_path), "--paper", "parm"])
    with pytest.raises(SystemExit):
        main()
    assert list(tmp_path.iterdir()) == []
