"""Pages have every section, load nothing from elsewhere, and show the numbers of the records."""

import base64
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from megatron_fssdp.reporting.html.html_page import Headline, HtmlPage
from megatron_fssdp.reporting.page.report_page import report_page
from megatron_fssdp.reporting.page.reported_run import read_reported_runs
from megatron_fssdp.reporting.records.time_parts import MEASURED_PARTS, time_parts

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.records.evaluations import Evaluation, append_evaluation
from megatron_fssdp.records.loads import read_loads
from megatron_fssdp.records.metrics import IterationMetrics, LayerMetrics, SeenGain, SelectionMetrics
from megatron_fssdp.records.metrics_file import MetricsWriter, read_metrics
from megatron_fssdp.records.placements import read_placements
from megatron_fssdp.report.colours import TIME_PARTS

from .made_runs import write_made_run
from .page_parts import PageParts, unpacked

SECTIONS = [
    *("loss", "time", "device-load", "expert-load", "placement"),
    *("replicas", "memory", "what-if", "figures"),
]


def page_of(*folders: Path) -> PageParts:
    return PageParts(report_page(read_reported_runs(folders)).html)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_made_run(tmp_path_factory.mktemp("runs") / "fssdp-1")


@pytest.fixture(scope="module")
def page(folder: Path) -> PageParts:
    return page_of(folder)


def test_the_page_has_all_sections_and_loads_nothing_from_elsewhere(page: PageParts) -> None:
    assert page.anchors == SECTIONS
    assert set(page.addresses) == {"data:,", *(f"#{anchor}" for anchor in SECTIONS)}
    assert not re.search(r"url\(|@import", "".join(page.styles))
    # Titles are text above the figures: inside, they would lie under legends on narrow screens.
    assert "Busiest device, max / mean" in page.texts["device-load"]
    assert not any("title" in figure["layout"] for figure in page.figures.values())
    # A section without a simulation says how to get one.
    assert "--cluster" in page.texts["what-if"]


def test_losses_and_loads_equal_the_records(page: PageParts, folder: Path) -> None:
    metrics = read_metrics(folder)
    loss = page.figures["loss"]["data"][0]
    np.testing.assert_array_equal(unpacked(loss["x"]), [1, 2, 3, 4, 5])
    np.testing.assert_allclose(unpacked(loss["y"]), [entry.lm_loss for entry in metrics], rtol=1e-6)
    before, mean, worst = (unpacked(trace["y"]) for trace in page.figures["device-load"]["data"])
    after_IL = np.array([[layer.load_max_over_mean for layer in entry.layers] for entry in metrics])
    before_IL = np.array([[layer.ep_load_max_over_mean for layer in entry.layers] for entry in metrics])
    np.testing.assert_allclose(before, before_IL.mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(mean, after_IL.mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(worst, after_IL.max(axis=1), rtol=1e-6)
    strips = page.figures["device-load-layers-0"]["data"]
    np.testing.assert_allclose(unpacked(strips[0]["z"]), before_IL.T, rtol=1e-6)
    np.testing.assert_allclose(unpacked(strips[1]["z"]), after_IL.T, rtol=1e-6)


def test_heat_maps_of_experts_show_the_router_counts(page: PageParts, folder: Path) -> None:
    tokens_ILE = read_loads(folder).counts_ILDE.sum(axis=2)
    maps = page.figures["expert-load-0"]["data"]
    assert len(maps) == 2
    for layer, trace in enumerate(maps):
        tokens_EI = tokens_ILE[:, layer].T
        np.testing.assert_allclose(unpacked(trace["z"]), tokens_EI / tokens_EI.mean(axis=0), rtol=1e-5)


def test_replicas_memory_and_figures_equal_the_records(page: PageParts, folder: Path) -> None:
    metrics = read_metrics(folder)
    replicas, moved = page.figures["replicas"]["data"]
    gathered, _ = page.figures["moved-bytes"]["data"]
    wanted = [sum(layer.num_replicas for layer in entry.layers) for entry in metrics]
    np.testing.assert_array_equal(unpacked(replicas["y"]), wanted)
    np.testing.assert_array_equal(unpacked(gathered["y"]), 1000 * np.array(wanted))
    assert (moved["x"], moved["customdata"]) == ([4], [3])
    peaks = np.array(metrics[-1].rank_peak_bytes) / 2**30
    np.testing.assert_allclose(page.figures["memory"]["data"][0]["y"], peaks)
    assert "experts 3.6 MiB: parameters 1 B" in page.texts["memory"]
    assert f"{metrics[-1].lm_loss:.4f}" in page.texts["figures"]


def test_the_viewer_shows_the_recorded_placements(page: PageParts, folder: Path) -> None:
    placements, loads = read_placements(folder), read_loads(folder)
    (shown,) = page.placements
    assert (shown["iterations"], shown["layers"]) == ([1, 2, 3, 4, 5], [1, 2])
    shape = (5, 2, shown["experts"], -(-shown["devices"] // 8))
    for name, wanted_ILED in (("owned", placements.owned_ILED), ("present", placements.present_ILED)):
        octets = np.frombuffer(base64.b64decode(shown[name]), np.uint8).reshape(shape)
        bits = np.unpackbits(octets, axis=-1, count=shown["devices"])
        np.testing.assert_array_equal(bits, wanted_ILED)
    for name, wanted in (
        ("expert", loads.counts_ILDE.sum(axis=2)),
        ("before", placements.ep_tokens_ILD),
        ("after", placements.tokens_ILD),
    ):
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(shown[name]), "<u4"), wanted.ravel())


def test_parts_of_an_iteration_s_time_add_up(folder: Path, page: PageParts) -> None:
    (run,) = read_reported_runs([folder])
    parts = time_parts(run.records)
    whole = [entry.iteration_s for entry in run.records.metrics]
    np.testing.assert_allclose(sum(parts.values()), whole)
    assert all((values >= 0).all() for values in parts.values())
    assert parts["re-sharding"].tolist() == [0, 0, 0, 0.2, 0]
    replicas = 2 * 3  # of two layers
    np.testing.assert_allclose(parts["waiting for spRS"], 0.002 * replicas)
    shown = {trace["name"]: unpacked(trace["y"]) for trace in page.figures["time"]["data"]}
    assert set(shown) == {TIME_PARTS[part].name for part in MEASURED_PARTS if part != "passes"}
    np.testing.assert_allclose(sum(shown.values()), whole, rtol=1e-6)


def test_parts_of_layers_equal_the_records(page: PageParts) -> None:
    names = ["attention, gate, dense", "dispatch: tokens to experts", "experts", "combine: results back"]
    for which, seconds_LP in (
        ("forward", [[20, 15, 20, 25], [30, 15, 20, 25]]),
        ("backward", [[60, 20, 40, 50]] * 2),
    ):
        shown = page.figures[f"time-{which}"]["data"]
        assert [trace["name"] for trace in shown] == names
        np.testing.assert_allclose([unpacked(trace["y"]) for trace in shown], np.transpose(seconds_LP))
    # The slowest experts of both passes and layers: 2 × (30 + 45) ms.
    assert "experts150" in page.texts["time"]


def test_a_run_without_parts_of_layers_shows_its_passes_undivided(tmp_path: Path) -> None:
    page = page_of(write_made_run(tmp_path / "old", has_parts=False))
    assert "time-forward" not in page.figures
    names = {trace["name"] for trace in page.figures["time"]["data"]}
    assert TIME_PARTS["passes"].name in names
    assert not names & {TIME_PARTS[part].name for part in ("outside", "experts", "all-to-all")}
    assert "did not measure the parts of its layers" in page.texts["time"]


def test_runs_are_compared_with_the_first(tmp_path: Path) -> None:
    ep = write_made_run(tmp_path / "ep", "ep")
    fssdp = write_made_run(tmp_path / "fssdp")
    again = write_made_run(tmp_path / "again", "fssdp", num_iterations=7, seed=1)
    page = page_of(ep, fssdp, again)
    assert page.anchors == ["settings", *SECTIONS]
    # Two runs have the same strategy, so all are named after their folders.
    assert [trace["name"] for trace in page.figures["loss"]["data"]] == ["ep", "fssdp", "again"]
    colours = [trace["line"]["color"] for trace in page.figures["loss"]["data"]]
    assert len(set(colours)) == 3
    assert "the loss equals that of ep exactly in 5 of 5 iterations" in page.texts["loss"]
    (difference,) = page.figures["loss-difference"]["data"]
    assert difference["name"] == "again"
    # The router counts of ep and fssdp are equal and shown once.
    assert [name for name in page.figures if name.startswith("expert-load")] == [
        "expert-load-0",
        "expert-load-2",
    ]
    assert [run["name"] for run in page.placements] == ["ep", "fssdp", "again"]


def test_validation_losses_stops_and_traces_are_shown(tmp_path: Path) -> None:
    folder = write_made_run(tmp_path / "x")
    for iteration, data in ((2, "validation"), (4, "validation"), (4, "test")):
        append_evaluation(folder, Evaluation(iteration, data, {"lm loss": 5.0 + iteration}))
    (folder / "torch_profile").mkdir()
    (folder / "torch_profile" / "rank-3.json.gz").touch()
    with (folder / "log.txt").open("a") as log:
        log.write("[fssdp] stopped after iteration 3: rank 1: killed by SIGKILL\n")
    page = page_of(folder)
    shown = {trace["name"]: (trace["x"], trace["y"]) for trace in page.figures["loss"]["data"][1:]}
    assert shown == {"fssdp, validation": ([2, 4], [7.0, 9.0]), "fssdp, test": ([4], [9.0])}
    assert "stopped after iteration 3: rank 1: killed by SIGKILL" in page.texts["parts"]
    assert "torch_profile/rank-3.json.gz" in page.texts["time"]
    assert "9.0000 (4)" in page.texts["figures"]


def test_predicted_and_seen_gains_of_auto_are_shown(tmp_path: Path) -> None:
    folder = write_made_run(tmp_path / "auto", "auto")
    records = read_metrics(folder)
    selections = {
        2: SelectionMetrics(0, (1, 2), 0.05, 1.0),
        4: SelectionMetrics(0, (2,), 0.01, 0.9, SeenGain(0.05, 1.0, 0.9, is_slower=False)),
        5: SelectionMetrics(0, (), 0.0, 1.2, SeenGain(0.01, 0.9, 1.2, is_slower=True)),
    }
    (folder / "metrics.jsonl").unlink()
    with closing(MetricsWriter(folder)) as writer:
        for record in records:
            chosen = (selections[record.iteration],) if record.iteration in selections else ()
            layers = tuple(replace(layer, strategy="fssdp") for layer in record.layers)
            writer.append(replace(record, layers=layers, selections=chosen))
    text = page_of(folder).texts["selections"]
    assert "auto, iteration 21, 250 ms (5.0%)100 ms (10.0%)" in text
    assert "auto, iteration 4210 ms (1.1%)-300 ms (-33.3%); taken back" in text


def test_selections_of_auto_are_shown_by_layer(tmp_path: Path) -> None:
    names = [["ep", "ep"], ["fssdp", "ep"], ["fssdp", "mine"]]
    with closing(MetricsWriter(tmp_path / "run")) as writer:
        for i, row in enumerate(names, start=1):
            layers = tuple(
                LayerMetrics(n, 1.0, 1.0, 0, 0, 0, 0, strategy=name) for n, name in enumerate(row, 1)
            )
            writer.append(IterationMetrics(i, 2.0, None, 1.0, 10.0, layers))
    page = page_of(tmp_path / "run")
    assert page.anchors == [*SECTIONS[:6], "selections", *SECTIONS[6:]]
    heat_map, *legend = page.figures["selections-0"]["data"]
    assert np.array(heat_map["text"]).T.tolist() == names
    assert [trace["name"] for trace in legend] == ["ep", "fssdp", "mine"]
    for index, trace in enumerate(legend):  # the colour at an index is the legend's
        place = (index - heat_map["zmin"]) / (heat_map["zmax"] - heat_map["zmin"])
        below = [colour for step, colour in heat_map["colorscale"] if step < place]
        assert below[-1] == trace["marker"]["color"]
    assert unpacked(heat_map["z"]).tolist() == [[0, 1, 1], [0, 0, 2]]


def test_a_run_of_one_iteration_has_a_page(tmp_path: Path) -> None:
    page = page_of(write_made_run(tmp_path / "short", num_iterations=1))
    assert page.anchors == SECTIONS
    assert page.figures["loss"]["data"][0]["mode"] == "lines+markers"


def test_pages_of_long_runs_stay_small(tmp_path: Path) -> None:
    sizes = {"num_iterations": 900, "num_layers": 3, "num_experts": 64, "num_devices": 16}
    runs = read_reported_runs([write_made_run(tmp_path / "long", **sizes)])
    html = report_page(runs).html
    short = read_reported_runs([write_made_run(tmp_path / "short", num_iterations=1)])
    assert len(html) - len(report_page(short).html) < 6e6
    page = PageParts(html)
    heat_map = page.figures["expert-load-0"]["data"][0]
    assert unpacked(heat_map["z"]).shape == (64, 300)
    assert "Each point is the mean of 3 iterations" in page.texts["expert-load"]
    (shown,) = page.placements
    assert (shown["iterations"][0], shown["iterations"][-1]) == (1, 900)
    assert len(shown["iterations"]) <= 200


def test_the_page_says_what_was_not_recorded(tmp_path: Path) -> None:
    stock = tmp_path / "none"
    with closing(MetricsWriter(stock)) as writer:
        writer.append(IterationMetrics(1, 2.0, None, 1.0, 10.0))
    page = page_of(stock)
    assert page.anchors == SECTIONS
    for anchor in ("device-load", "expert-load", "placement", "replicas"):
        assert "strategy none" in page.texts[anchor]
    assert "This run did not record memory" in page.texts["memory"]
    running = write_made_run(tmp_path / "running")
    for name in ("loads.npy", "placements.npy"):
        (running / name).unlink()
    page = page_of(running)
    assert "not written yet" in page.texts["expert-load"]
    assert "no placements.npy yet" in page.texts["placement"]
    assert "device-load-ranked" not in page.figures


def test_damaged_records_give_one_line(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "loads.npy", "placements.npy"):
        folder = write_made_run(tmp_path / name)
        octets = (folder / name).read_bytes()
        (folder / name).write_bytes(octets[30:])
        with pytest.raises(ConfigurationError, match=f"{name}: .*incomplete") as caught:
            page_of(folder)
        assert "\n" not in str(caught.value)


def test_names_are_escaped_in_the_page(tmp_path: Path) -> None:
    folder = write_made_run(tmp_path / "<b>&'\"")
    (folder / "config.yaml").write_text("strategy: {name: '</script><script>alert(1)</script>'}\n")
    page = page_of(folder, write_made_run(tmp_path / "ep", "ep"))
    assert page.anchors == ["settings", *SECTIONS]
    assert page.placements[0]["name"] == "</script><script>alert(1)</script>"


def test_a_page_is_written_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new" / "report.html"

    def write(title: str, path: Path) -> None:
        HtmlPage("report", title, (), Headline("", ()), ()).write(path)

    write("first", target)
    assert "<h1>first</h1>" in target.read_text()

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        write("second", target)
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]
    assert "<h1>first</h1>" in target.read_text()
    with pytest.raises(ConfigurationError, match="is not a folder"):
        write("x", target / "below.html")
