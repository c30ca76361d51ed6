import re
from dataclasses import replace

import numpy as np
import pytest

from megatron_fssdp.records.loads import read_loads, read_micro_batch_loads
from megatron_fssdp.records.metrics import IterationMetrics, MetricsWriter, SelectionMetrics, read_metrics
from megatron_fssdp.records.placements import read_placements
from megatron_fssdp.report.measures import shown_runs
from megatron_fssdp.report.run_page import run_page

from .made_runs import write_made_run
from .page_parts import PageParts, unpacked

SECTIONS = [
    *("loss", "iteration-time", "device-load", "expert-load-over-iterations"),
    *("replicas-of-every-expert", "all-figures"),
]
LOSS, TIME, LOAD, EXPERTS, REPLICAS, FIGURES = SECTIONS


def page_of(*folders):
    return PageParts(run_page(shown_runs(folders)).html)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_made_run(tmp_path_factory.mktemp("runs") / "fssdp-1")


@pytest.fixture(scope="module")
def page(folder):
    return page_of(folder)


def test_the_page_has_all_sections_and_loads_nothing_from_elsewhere(page):
    assert page.anchors == SECTIONS
    assert set(page.addresses) == {"data:,", *(f"#{anchor}" for anchor in SECTIONS)}
    assert not re.search(r"url\(|@import", "".join(page.styles))
    assert "Busiest device, mean of layers" in page.texts[LOAD]  # titles are text above the figures


def test_figures_equal_the_records(page, folder):
    metrics = read_metrics(folder)
    (loss,) = page.figures[LOSS][0]["data"]
    np.testing.assert_array_equal(unpacked(loss["x"]), [1, 2, 3, 4, 5])
    np.testing.assert_allclose(unpacked(loss["y"]), [entry.lm_loss for entry in metrics], rtol=1e-6)
    curves, strips = page.figures[LOAD]
    before, mean = (unpacked(trace["y"]) for trace in curves["data"])
    after_IL = np.array([[layer.load_max_over_mean for layer in entry.layers] for entry in metrics])
    before_IL = np.array([[layer.ep_load_max_over_mean for layer in entry.layers] for entry in metrics])
    np.testing.assert_allclose(before, before_IL.mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(mean, after_IL.mean(axis=1), rtol=1e-6)
    for trace, load_IL in zip(strips["data"], (before_IL, after_IL), strict=True):
        np.testing.assert_allclose(unpacked(trace["z"]), load_IL.T, rtol=1e-6)
    tokens_ILE = read_loads(folder).counts_ILDE.sum(axis=2)
    for layer, trace in enumerate(page.figures[EXPERTS][0]["data"]):
        tokens_EI = tokens_ILE[:, layer].T
        np.testing.assert_allclose(unpacked(trace["z"]), tokens_EI / tokens_EI.mean(axis=0), rtol=1e-5)
    assert "1 GiB to 1.19 GiB" in page.texts[FIGURES]
    assert "experts 3.6 MiB: parameters 1 B" in page.texts[FIGURES]
    assert f"{metrics[-1].lm_loss:.4f}" in page.texts[FIGURES]
    replicas_ILE = read_placements(folder).present_ILED.sum(axis=3) - 1
    assert replicas_ILE.any()
    for layer, trace in enumerate(page.figures[REPLICAS][0]["data"]):
        np.testing.assert_array_equal(unpacked(trace["z"]), replicas_ILE[:, layer].T)


def test_runs_are_compared_with_the_first(tmp_path):
    ep = write_made_run(tmp_path / "ep", "ep")
    fssdp = write_made_run(tmp_path / "fssdp")
    again = write_made_run(tmp_path / "again", "fssdp", num_iterations=7, seed=1)
    page = page_of(ep, fssdp, again)
    assert page.anchors == ["settings-that-differ", *SECTIONS]
    (losses,) = page.figures[LOSS]
    # Two runs have the same strategy, so all are named after their folders.
    assert [trace["name"] for trace in losses["data"]] == ["ep", "fssdp", "again"]
    assert len({trace["line"]["color"] for trace in losses["data"]}) == 3
    assert "losses differ by at most " in page.summary
    # The router counts of ep and fssdp are equal and shown once.
    assert len(page.figures[EXPERTS]) == 2
    assert "fssdp is not shown" in page.texts[EXPERTS]
    assert len(page.figures[REPLICAS]) == 2
    assert "No replicas in ep." in page.texts[REPLICAS]
    assert "fssdp: experts moved to new owners 1 time." in page.texts[REPLICAS]


def test_stops_are_shown(tmp_path):
    folder = write_made_run(tmp_path / "x")
    with (folder / "log.txt").open("a") as log:
        log.write("[fssdp] stopped after iteration 3: rank 1: killed by SIGKILL\n")
    page = page_of(folder)
    assert "stopped after iteration 3: rank 1: killed by SIGKILL" in page.texts["interruptions"]


def test_loads_between_micro_batches_are_shown(tmp_path):
    folder = write_made_run(tmp_path / "x", num_micro_batches=3)
    page = page_of(folder, write_made_run(tmp_path / "y"))  # with one micro-batch, which has no file
    assert page.anchors == [*SECTIONS[:3], "between-micro-batches", *SECTIONS[3:]]
    loads = read_micro_batch_loads(folder)
    device_IZLD = loads.counts_IZLDE.sum(axis=3).reshape(5, 3, 2, 4, 2).sum(axis=4)
    plain_IZL = device_IZLD.max(axis=3) / device_IZLD.mean(axis=3)
    assert re.search(rf"layer 2\s*{np.median(plain_IZL[..., 1]):.2f}", page.texts["between-micro-batches"])
    (folder / "micro_batch_loads.npy").write_bytes(b"damaged")
    assert "micro_batch_loads.npy: damaged" in page_of(folder).texts["files-that-cannot-be-read"]


def test_predicted_and_seen_gains_of_auto_are_shown(tmp_path):
    folder = write_made_run(tmp_path / "auto", "auto", num_iterations=8)
    records = read_metrics(folder)
    selections = {3: ((1, 2), 0.05), 4: ((), 0.0), 6: ((2,), 0.01)}
    seconds = (9.0, 1.0, 9.0, 0.8, 1.0, 9.0, 1.2, 1.2)
    writer = MetricsWriter(folder)  # the first iteration drops the made ones
    for record, iteration_s in zip(records, seconds, strict=True):
        chosen = selections.get(record.iteration)
        changes = {
            "selections": (SelectionMetrics(0, *chosen),) if chosen else (),
            "iteration_s": iteration_s,
        }
        layers = tuple(replace(layer, strategy="fssdp") for layer in record.layers)
        writer.append(replace(record, layers=layers, **changes))
    text = page_of(folder).texts[REPLICAS]
    assert re.search(r"auto, iteration 3\s*1, 2\s*fssdp\s*50 ms \(5.0%\)\s*100 ms \(10.0%\)", text)
    assert re.search(r"auto, iteration 6\s*2\s*fssdp\s*10 ms \(1.1%\)\s*-300 ms \(-33.3%\)", text)


@pytest.mark.parametrize("num_iterations", [1, 900])
def test_pages_of_short_and_long_runs(num_iterations, tmp_path):
    sizes = {"num_layers": 3, "num_experts": 64, "num_devices": 16}
    html = run_page(shown_runs([write_made_run(tmp_path, num_iterations=num_iterations, **sizes)])).html
    assert len(html) < 12e6
    page = PageParts(html)
    assert page.anchors == SECTIONS
    assert page.figures[LOSS][0]["data"][0]["mode"] == ("lines" if num_iterations > 2 else "lines+markers")
    bins = min(num_iterations, 300)
    assert unpacked(page.figures[EXPERTS][0]["data"][0]["z"]).shape == (64, bins)
    x_title = page.figures[LOAD][0]["layout"]["xaxis"]["title"]["text"]
    assert ("each point is the mean of 2" in x_title) is (num_iterations > 600)


def test_the_page_says_what_was_not_recorded(tmp_path):
    writer = MetricsWriter(tmp_path / "none")
    writer.append(IterationMetrics(1, 2.0, None, 1.0, 10.0))
    page = page_of(tmp_path / "none")
    assert page.anchors == SECTIONS
    for anchor in (LOAD, EXPERTS, REPLICAS):
        assert "strategy none" in page.texts[anchor]
    without = write_made_run(tmp_path / "without", has_parts=False)
    (without / "loads.npy").write_bytes(b"damaged")
    (without / "placements.npy").unlink()
    page = page_of(without)
    assert "loads.npy: damaged" in page.texts["files-that-cannot-be-read"]
    assert "loads.npy is not there, or cannot be read" in page.texts[EXPERTS]
    assert "placements.npy is not there" in page.texts[REPLICAS]
    assert "did not measure the parts of its layers" in page.texts[TIME]
    assert len(page.figures[LOAD]) == 2


def test_names_are_escaped_in_the_page(tmp_path):
    folder = write_made_run(tmp_path / "<b>&'\"")
    (folder / "config.yaml").write_text("strategy: {name: '</script><script>alert(1)</script>'}\n")
    page = page_of(folder, write_made_run(tmp_path / "ep", "ep"))
    assert page.anchors == SECTIONS
    assert page.figures[LOSS][0]["data"][0]["name"] == "</script><script>alert(1)</script>"
