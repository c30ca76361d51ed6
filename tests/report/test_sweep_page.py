"""Repeated runs: medians and quartiles, losses against the same seed, and the page."""

import re
from pathlib import Path

import numpy as np
import pytest
from megatron_fssdp.report.trainings.repeated_runs import (
    LOADS,
    SPEEDS,
    RunGroup,
    detailed_runs,
    group_records,
    group_table,
    sweep_page,
)

from megatron_fssdp.records import load

from .made_runs import write_made_run
from .page_parts import PageParts


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


def test_groups_are_compared_seed_by_seed(groups: list[RunGroup]) -> None:
    ep, fssdp = groups
    assert ep.first is ep.runs[(1, 1)]
    differences = [
        np.abs(fssdp.runs[repeat].losses - ep.runs[repeat].losses) / ep.runs[repeat].losses
        for repeat in ep.runs
    ]
    assert fssdp.loss_difference(ep) == pytest.approx(max(each.max() for each in differences))
    assert RunGroup("other", {(9, 1): ep.runs[(1, 1)]}).loss_difference(ep) is None
    table = group_table(groups)
    assert [row[:2] for row in table.rows] == [("ep", "3"), ("fssdp", "3")]
    loads = [run.load_IL.mean() for run in fssdp.runs.values()]
    low, median, high = np.quantile(loads, (0.25, 0.5, 0.75))
    assert table.rows[1][3] == f"{median:.3f} ({low:.3f} to {high:.3f})"
    assert table.rows[0][-1] == "–"
    records = group_records(groups)
    assert records[1][LOADS]["median"] == pytest.approx(np.median(loads))
    assert len(records[1][SPEEDS]["runs"]) == 3


def test_the_page_opens_with_the_groups_and_details_one_run_of_each(groups: list[RunGroup]) -> None:
    html = sweep_page("sweep x", groups, detailed_runs(groups), ["ep-seed4"]).html
    page = PageParts(html)
    assert page.anchors[0] == "repeated-runs"
    assert "ep-seed4" in page.texts["repeated-runs"]
    ep, fssdp = page.figures["repeated-runs"][1]["data"]  # of the device load
    assert (ep["name"], fssdp["name"]) == ("ep", "fssdp")
    assert fssdp["x"] == groups[1].values(LOADS)
    assert len(ep["x"]) == 3
    assert len(page.figures["loss"][0]["data"]) == 2
    assert "<h1>sweep x</h1>" in html
    speeds = [group.spread(SPEEDS).median for group in groups]
    assert re.match(rf"fssdp: {speeds[1] / speeds[0]:.2f} × ep", page.summary)
    assert page.summary.endswith("; 1 run is missing.")
    alone = sweep_page("sweep x", groups[:1], detailed_runs(groups[:1]))
    assert alone.sentence.startswith("ep: busiest device ")
