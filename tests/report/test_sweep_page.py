import re
from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.records import load
from megatron_fssdp.report.trainings.shown_run import ShownRun, shown_groups
from megatron_fssdp.report.trainings.sweep_page import group_records, group_table, loss_difference, sweep_page

from .made_runs import write_made_run
from .page_parts import PageParts


@pytest.fixture
def groups(tmp_path: Path) -> list[ShownRun]:
    def repeats(strategy: str) -> dict:
        folders = {seed: tmp_path / f"{strategy}-{seed}" for seed in (3, 1, 2)}
        return {(seed, 1): load(write_made_run(one, strategy, seed=seed)) for seed, one in folders.items()}

    return shown_groups({strategy: repeats(strategy) for strategy in ("ep", "fssdp")})


def test_groups_are_compared_seed_by_seed(groups: list[ShownRun]) -> None:
    ep, fssdp = groups
    assert ep.run is ep.repeats[1, 1]
    pairs = [(run.losses, fssdp.repeats[repeat].losses) for repeat, run in ep.repeats.items()]
    assert loss_difference(fssdp, ep) == pytest.approx(max(np.abs(b / a - 1).max() for a, b in pairs))
    assert loss_difference(*shown_groups({"other": {(9, 1): ep.run}}), ep) is None
    table = group_table(groups)
    assert [row[:2] for row in table.rows] == [("ep", "3"), ("fssdp", "3")]
    loads = [run.load_IL.mean() for run in fssdp.repeats.values()]
    low, median, high = np.quantile(loads, (0.25, 0.5, 0.75))
    assert table.rows[1][3] == f"{median:.3f} ({low:.3f} to {high:.3f})"
    assert table.rows[0][-1] == "–"
    records = group_records(groups)
    assert records[1]["load_max_over_mean"]["median"] == pytest.approx(np.median(loads))
    assert records[1]["load_max_over_mean"]["runs"] == pytest.approx(loads)
    assert len(records[1]["tokens_per_s"]["runs"]) == 3


def test_the_page_opens_with_the_groups_and_details_one_run_of_each(groups: list[ShownRun]) -> None:
    html = sweep_page("sweep x", groups, ["ep-seed4"]).html
    page = PageParts(html)
    assert page.anchors[0] == "repeated-runs"
    assert "ep-seed4" in page.texts["repeated-runs"]
    assert group_table(groups).rows[1][3] in page.texts["repeated-runs"]
    assert len(page.figures["loss"][0]["data"]) == 2
    assert "<h1>sweep x</h1>" in html
    speeds = [record["tokens_per_s"]["median"] for record in group_records(groups)]
    assert re.match(rf"fssdp {speeds[1] / speeds[0]:.2f} × ep", page.summary)
    assert page.summary.endswith(". 1 run is missing.")
    assert sweep_page("sweep x", groups[:1]).sentence.startswith("ep: 5 iterations; busiest device ")
