import importlib
import inspect
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from benchmarks.papers import results
from benchmarks.papers.claims import PAPERS, SKEWS, Answer, claims, words
from benchmarks.papers.pro_prophet_equations import compared
from benchmarks.papers.setting import Model, Setting, kept_in_nodes
from benchmarks.reproduce_papers import main, print_rows, rows_of
from megatron_fssdp.planning.placement.topology import Topology
from tests.support.python_process import ROOT

REPRODUCE = "run `python benchmarks/reproduce_papers.py --write` and `python scripts/docs/tables.py`"


def test_claims_are_complete_and_their_quantities_exist():
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


def test_ratios_compare_geometric_means():
    row = replace(claims()[0], kind="row", low=1.0, high=4.0)
    near = Answer(row, [1.9, 2.0], [4.0], "")
    assert near.ratio() == pytest.approx(np.sqrt(1.9 * 2.0) / 2)
    assert near.is_near()
    assert not near.is_near(padded=True)
    assert Answer(replace(row, kind="larger"), [(3.0, 2.0), (1.0, 2.0), (2.0, 2.0)], [], "").holds_in == 1


@pytest.mark.parametrize("leaving_share", [0.0, 0.2, 1.0])
def test_the_gate_keeps_tokens_beyond_the_allowed_number_in_their_node(leaving_share):
    rng = np.random.default_rng(0)
    counts_ILDE = rng.multinomial(1000, np.arange(1, 9) / 36, size=(3, 2, 4))
    kept = kept_in_nodes(counts_ILDE, Topology.uniform(4, 2), leaving_share)
    assert np.abs(kept.sum(axis=-1) - 1000).max() <= 4  # rounding
    for device, near in ((0, slice(0, 4)), (3, slice(4, 8))):
        away = 1000 - kept[:, :, device, near].sum(axis=-1)
        wanted = 1000 - counts_ILDE[:, :, device, near].sum(axis=-1)
        assert (np.abs(away - np.minimum(wanted, 1000 * leaving_share)) <= 4).all()


def test_pro_prophets_equations_know_compute_but_not_which_link_tokens_take():
    """Eq. 2 equals the simulator. In Eq. 1, a node's link is too fast and a device's share too slow."""
    setting = Setting(Model(1024, 1024, 2), "hpwnv", 1.25, 16, 16, 2, 1, num_iterations=5)
    for bandwidth, is_slower in (("a device's share", True), ("a node's link", False)):
        seconds = compared(setting, bandwidth)
        modelled_s, simulated_s = seconds["EC"].T
        assert modelled_s == pytest.approx(simulated_s)
        modelled_s, simulated_s = seconds["A2A"].T
        assert ((modelled_s > simulated_s) == is_slower).all()


@pytest.mark.timeout(3600)  # Hecate takes some minutes of a core
@pytest.mark.parametrize(
    "paper", [paper if paper == "parm" else pytest.param(paper, marks=pytest.mark.slow) for paper in PAPERS]
)
def test_the_kept_results_are_those_that_are_simulated(paper):
    kept = [row for row in results.read() if row["paper"] == paper]
    assert kept == rows_of(paper, SKEWS.get(paper, 0.0)), REPRODUCE
    for row in kept:  # a missed row says why
        assert row["why"] or row["padded"] or row["holds"] not in ("no", "direction")


def test_the_kept_results_are_about_the_claims_and_the_page_shows_the_headlines():
    """Also of papers that take long to simulate. Other tests compare the page's tables with the file."""
    kept, page = results.read(), (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    assert len(kept) == len(claims())
    for row, claim in zip(kept, claims(), strict=True):
        stated = words([claim.low, claim.high]) if claim.low > 0 else ""
        stored = [row[name] for name in ("paper", "kind", "where", "claim", "published", "headline")]
        where = claim.where or "(ours)"
        wanted = [claim.paper, claim.kind, where, claim.what, stated, claim.headline]
        assert stored == wanted, REPRODUCE
        assert not claim.headline or f"| {claim.headline} | {stated} |" in page
    assert all(f"<!-- table: papers {paper} -->" in page for paper in PAPERS)


def test_rows_say_what_holds():
    row = replace(claims()[0], kind="row", low=2.0, high=2.0, note="so", headline="faster")

    def row_of(*values, padded=(), **others):
        return results.row_of(Answer(replace(row, **others), list(values), list(padded), ""))

    rows = [row_of(2.0, padded=[4.0]), row_of(1.1, 1.3), row_of(0.9, 1.3), row_of(1.3, headline="", note="")]
    whether = [("yes", ""), ("direction", "so"), ("no", "so"), ("no", "open")]
    assert [(result["holds"], result["why"]) for result in rows] == whether
    assert (rows[0]["padded"], rows[0]["padded ratio"], rows[0]["padded holds"]) == ("4.00", "2.00", "no")
    rows += [row_of(2.0, kind="input"), row_of(2.0, kind="ours"), row_of(kind="none")]
    assert [result["holds"] for result in rows[4:]] == ["input", "", "not simulated"]
    assert results.count(rows) == (1, 4)
    assert results.count(rows, "padded holds") == (0, 1)
    larger = Answer(replace(row, kind="larger", low=float("nan")), [(3.0, 2.0), (1.0, 2.0)], [], "")
    shown = results.row_of(larger)
    assert (shown["published"], shown["simulated"], shown["holds"]) == ("", "0.50–1.50", "1 of 2")


def test_a_paper_is_printed_with_all_its_claims(capsys):
    rows = [row for row in results.read() if row["paper"] == "hecate"]
    print_rows(Console(width=160), "hecate", rows, 1.2)
    near, total = results.count(rows)
    printed = capsys.readouterr().out
    assert f"{near} of {total} numbers" in printed
    for row in rows:
        assert row["simulated"] in printed
        assert row["claim"][:12] in printed


def test_results_are_only_written_for_all_papers(monkeypatch):
    before = results.FILE.read_bytes()
    monkeypatch.setattr("sys.argv", ["reproduce_papers.py", "--write", "--paper", "parm"])
    with pytest.raises(SystemExit):
        main()
    assert results.FILE.read_bytes() == before
