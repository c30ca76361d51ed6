import importlib
import inspect
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers.claims import NEAR, PAPERS, Answer, answered, claims, count, of_paper, words
from benchmarks.papers.pages import entry_page, file_name, paper_page
from benchmarks.papers.pro_prophet_equations import compared
from benchmarks.papers.setting import Model, Setting, kept_in_nodes
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


def test_pro_prophets_equations_know_compute_but_not_which_link_tokens_take() -> None:
    """Eq. 2 equals the simulator. In Eq. 1, a node's link is too fast and a device's share too slow."""
    setting = Setting(Model(1024, 1024, 2), "hpwnv", 1.25, 16, 16, 2, 1, num_iterations=5)
    for bandwidth, is_slower in (("a device's share", True), ("a node's link", False)):
        found = compared(setting, bandwidth)
        modelled_s, simulated_s = found["EC"].T
        assert modelled_s == pytest.approx(simulated_s)
        modelled_s, simulated_s = found["A2A"].T
        assert ((modelled_s > simulated_s) == is_slower).all()


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


def test_pages_are_only_written_for_all_papers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["reproduce_papers.py", "--pages", str(tmp_path), "--paper", "parm"])
    with pytest.raises(SystemExit):
        main()
    assert list(tmp_path.iterdir()) == []
