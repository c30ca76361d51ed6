"""Repeated runs: medians and quartiles, losses against the same seed, and the page."""

import re
from pathlib import Path

import numpy as np
import pytest
from megatron_fssdp.reporting.sweep.run_groups import LOAD, SPEED, Spread, group_table
from megatron_fssdp.reporting.sweep.sweep_page import sweep_headline

from megatron_fssdp.records.recorded_run import load
from megatron_fssdp.report.runs.run_groups import RunGroup, group_records
from megatron_fssdp.report.runs.sweep_page import detailed_runs, sweep_page

from ..page.made_runs import write_made_run
from ..page.page_parts import PageParts


@pytest.fixture
def groups(tmp_path: Path) -> list[RunGroup]:
    return [
        RunGroup(
            strategy,
            {
                (seed, 1): load(write_made_run(tmp_path / f"{strategy}-{seed}", strategy, seed=seed))
                for seed in (3, 1, 2)
            },
        )
        for strategy in ("ep", "fssdp")
    ]


def test_a_spread_has_numpys_quartiles_and_knows_overlap() -> None:
    spread = Spread((4.0, 1.0, 2.0))
    assert spread.quartiles == tuple(np.quantile([1, 2, 4], (0.25, 0.5, 0.75)))
    assert spread.text(".1f") == "2.0 (1.5 to 3.0)"
    assert Spread((2.0,)).text(".1f") == "2.0"
    assert spread.overlaps(Spread((3.0, 5.0, 1.0)))
    assert not spread.overlaps(Spread((7.0, 8.0)))


def test_a_group_is_shown_by_its_first_seed_and_compared_seed_by_seed(groups: list[RunGroup]) -> None:
    ep, fssdp = groups
    assert ep.first is ep.runs[(1, 1)]
    differences = [
        np.abs(fssdp.runs[repeat].losses - ep.runs[repeat].losses) / ep.runs[repeat].losses
        for repeat in ep.runs
    ]
    assert fssdp.loss_difference(ep) == pytest.approx(max(each.max() for each in differences))
    assert RunGroup("other", {(9, 1): ep.runs[(1, 1)]}).loss_difference(ep) is None


def test_the_table_has_the_median_of_the_runs(groups: list[RunGroup]) -> None:
    header, rows = group_table(groups)
    assert len(header) == len(rows[0]) == len(rows[1])
    assert [row[:2] for row in rows] == [("ep", "3"), ("fssdp", "3")]
    loads = [run.load_IL.mean() for run in groups[1].runs.values()]
    assert rows[1][3].startswith(f"{np.median(loads):.3f} (")
    assert rows[0][-1] == "–"
    records = group_records(groups)
    assert records[1][LOAD.key]["median"] == pytest.approx(np.median(loads))
    assert len(records[1][SPEED.key]["runs"]) == 3


def test_the_page_opens_with_the_groups_and_details_one_run_of_each(groups: list[RunGroup]) -> None:
    html = sweep_page("sweep x", groups, detailed_runs(groups), ["ep-seed4"]).html
    page = PageParts(html)
    assert page.anchors[0] == "repeated"
    assert "ep-seed4" in page.texts["repeated"]
    dots, medians = page.figures["repeated-load-max-over-mean"]["data"]
    assert (len(dots["x"]), len(medians["x"])) == (6, 2)
    assert medians["y"] == ["ep", "fssdp"]
    assert len(page.figures["loss"]["data"]) == 2
    assert "<h1>sweep x</h1>" in html


def test_the_first_sentence_compares_with_the_first_group(groups: list[RunGroup]) -> None:
    headline = sweep_headline(groups, ["ep-seed4"])
    speeds = [group.spread(SPEED).median for group in groups]
    assert re.match(rf"fssdp: {speeds[1] / speeds[0]:.2f} × ep", headline.sentence)
    assert headline.sentence.endswith("; 1 run is missing.")
    spreads = [group.spread(SPEED) for group in groups]
    labels = {tile.label for tile in headline.tiles}
    assert any(label.startswith("fastest") for label in labels) is not spreads[0].overlaps(spreads[1])
    assert "most even: fssdp" in labels
    alone = sweep_headline(groups[:1]).sentence
    assert alone.startswith("ep: busiest device ")
