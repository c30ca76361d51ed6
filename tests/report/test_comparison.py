from contextlib import closing
from pathlib import Path

import pytest
from megatron_fssdp.reporting.comparison_table import comparison_table
from megatron_fssdp.reporting.device_load_plot import draw_device_loads
from megatron_fssdp.reporting.records.recorded_run import distinct_names
from rich.console import Console

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.records.metrics import IterationMetrics, LayerMetrics
from megatron_fssdp.records.metrics_file import MetricsWriter
from megatron_fssdp.records.recorded_run import load
from megatron_fssdp.report.units import format_bytes


def write_run(
    folder: Path, strategy: str | None, load: float, num_iterations: int = 5, layers=(2, 4)
) -> Path:
    with closing(MetricsWriter(folder)) as writer:
        for iteration in range(1, num_iterations + 1):
            moved = 0 if load == 2.0 else 1000
            found = tuple(
                LayerMetrics(layer, 2.0, load + 0.1 * layer, moved // 500, moved, moved // 2, 7)
                for layer in layers
            )
            loss = 8.0 - iteration
            writer.append(IterationMetrics(iteration, loss, None, 0.5, 100.0 * iteration, found))
    if strategy is not None:
        (folder / "config.yaml").write_text(f"strategy:\n  name: {strategy}\n")
    return folder


def test_the_table_shows_the_figures_of_two_runs(tmp_path):
    ep = load(write_run(tmp_path / "a", "ep", 2.0))
    fssdp = load(write_run(tmp_path / "b", "fssdp", 1.0, num_iterations=6))
    assert (ep.strategy, fssdp.strategy) == ("ep", "fssdp")
    assert ep.load_IL.shape == (5, 2)
    assert fssdp.total("spag_bytes") == 6 * 2 * 1000
    console = Console(width=100, record=True)
    console.print(comparison_table(ep, fssdp))
    text = console.export_text()
    for words in ("7.0000", "3.0000", "2.0000", "2.300", "1.300", "300", "350", "12.0 kB", "6.0 kB", "84"):
        assert words in text
    assert "0.0e+00 relative" in text


def test_hidden_transfers_and_reshards_have_rows_where_a_run_has_them(tmp_path):
    ep = load(write_run(tmp_path / "a", "ep", 2.0))
    busy = [
        LayerMetrics(2, 2.0, 1.1, 1, 10, 5, 0, spag_s=1.0, spag_exposed_s=0.25),
        LayerMetrics(4, 2.0, 1.1, 1, 10, 5, 0, spag_s=3.0, spag_exposed_s=0.5),
    ]
    with closing(MetricsWriter(tmp_path / "b")) as writer:
        for iteration in (1, 2, 3):
            moved = (4, 2_500_000, 0.5) if iteration != 2 else (0, 0, 0.0)
            writer.append(IterationMetrics(iteration, 7.0, None, 0.5, 100.0, tuple(busy), *moved))
    moving = load(tmp_path / "b")
    assert moving.hidden_share("spag") == 1 - 0.75 / 4
    assert moving.hidden_share("sprs") is None
    assert [record.iteration for record in moving.reshards] == [1, 3]

    def rows(*runs):
        console = Console(width=100, record=True)
        console.print(comparison_table(*runs))
        lines = [[cell.strip() for cell in line.split("│")] for line in console.export_text().splitlines()]
        return {cells[1]: cells[2:4] for cells in lines if len(cells) > 3}

    both = rows(ep, moving)
    assert both["hidden under compute: weights (spAG)"] == ["–", "81%"]
    assert both["re-shards"] == ["–", "2"]
    assert both["re-shards: experts moved"] == ["–", "8"]
    assert both["re-shards: bytes moved"] == ["–", "5.0 MB"]
    assert both["re-shards: seconds"] == ["–", "1.00"]
    assert rows(moving, ep)["re-shards"] == ["2", "–"]
    assert not [label for label in both if "spRS" in label and "hidden" in label]
    assert not [label for label in rows(ep, ep) if "hidden" in label or "re-shards" in label]


def test_runs_get_distinct_names(tmp_path):
    first = load(write_run(tmp_path / "a", "ep", 2.0))
    second = load(write_run(tmp_path / "b", "ep", 2.0))
    third = load(write_run(tmp_path / "c", None, 1.0))
    assert distinct_names(first, second) == ["a", "b"]
    assert distinct_names(first, third) == ["ep", "c"]


@pytest.mark.parametrize("num_iterations", [1, 5])
def test_the_picture_is_drawn(tmp_path, num_iterations):
    pytest.importorskip("matplotlib")
    ep = load(write_run(tmp_path / "a", "ep", 2.0, num_iterations))
    fssdp = load(write_run(tmp_path / "b", "fssdp", 1.0, layers=tuple(range(1, 20))))
    draw_device_loads([ep, fssdp], tmp_path / "new" / "loads.png")
    assert (tmp_path / "new" / "loads.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="is not a folder"):
        draw_device_loads([ep, fssdp], tmp_path / "file" / "loads.png")


def test_runs_without_loads_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file"):
        load(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigurationError, match="no finished iteration"):
        load(tmp_path)
    with closing(MetricsWriter(tmp_path)) as writer:
        for number in (1, 2):
            layer = LayerMetrics(number, 1.0, 1.0, 0, 0, 0, 0)
            writer.append(IterationMetrics(number, 1.0, None, 1.0, 1.0, (layer,)))
    with pytest.raises(ConfigurationError, match="mixes different models"):
        load(tmp_path)


def test_stock_megatron_has_losses_to_compare_but_no_loads(tmp_path):
    none = load(write_run(tmp_path / "none", "none", 1.0, layers=()))
    ep = load(write_run(tmp_path / "ep", "ep", 2.0))
    console = Console(width=100, record=True)
    console.print(comparison_table(none, ep))
    assert "0.0e+00 relative" in console.export_text()
    with pytest.raises(ConfigurationError, match="no recorded loads of MoE layers"):
        draw_device_loads([none, ep], tmp_path / "loads.png")


def test_bytes_are_formatted_with_units():
    assert [format_bytes(n) for n in (0, 999, 1000, 2.5e6, 3e9, 4e15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "2.5 MB",
        "3.0 GB",
        "4,000.0 TB",
    ]
