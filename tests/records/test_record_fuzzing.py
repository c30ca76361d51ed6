"""Files of a run with any content load to valid records, or are refused in one line that names the file."""

import io
import json
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from megatron_fssdp.reporting.comparison_table import comparison_table
from megatron_fssdp.reporting.page.report_page import report_page
from megatron_fssdp.reporting.page.reported_run import read_reported_runs
from rich.console import Console

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.data.manifest import MANIFEST_FILE, BuiltFile, DataManifest, read_manifest
from megatron_fssdp.records.loads import LOADS_FILE, read_loads
from megatron_fssdp.records.metrics import IterationMetrics, LayerMetrics
from megatron_fssdp.records.metrics_file import METRICS_FILE, MetricsWriter
from megatron_fssdp.records.placements import PLACEMENTS_FILE, PlacementsWriter, read_placements
from megatron_fssdp.records.recorded_run import load
from tests.drawn_examples import examples

from .row_files import rows_in, save_rows

CHANGES = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 40), st.binary(max_size=6)), min_size=1, max_size=5
)


def changed(content: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    """Replace some bytes by others, at places given as fractions of the length."""
    for place, num_removed, added in changes:
        at = round(place * len(content))
        content = content[:at] + added + content[at + num_removed :]
    return content


def write_loads(folder: str) -> Path:
    counts = np.random.default_rng(0).integers(0, 99, (3, 2, 4, 8), dtype=np.int32)
    file = Path(folder, LOADS_FILE)
    layers = np.tile(np.arange(1, 3), (3, 1))
    save_rows(file, counts_ILDE=counts, iterations=np.arange(1, 4), layers=layers)
    return file


def loads_or_refusal(file: Path) -> None:
    try:
        loads = read_loads(file.parent)
    except ConfigurationError as error:
        refused_in_one_line(error, file)
        return
    assert loads.counts_ILDE.dtype == np.int32
    assert loads.counts_ILDE.shape[:2] == (len(loads.iterations), len(loads.layers))
    assert loads.counts_ILDE.min(initial=0) >= 0


def refused_in_one_line(error: ConfigurationError, file: Path) -> None:
    assert len(str(error).splitlines()) == 1
    assert str(file) in str(error)


@given(CHANGES)
@examples(200)
def test_changed_loads_are_valid_or_refused(changes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = write_loads(folder)
        file.write_bytes(changed(file.read_bytes(), changes))
        loads_or_refusal(file)


ANY_ARRAY = arrays.arrays(
    arrays.scalar_dtypes() | st.just(np.dtype("U3")), arrays.array_shapes(min_dims=0, max_dims=5, min_side=0)
)


@given(
    st.dictionaries(st.sampled_from(["counts_ILDE", "iterations", "layers", "other"]), ANY_ARRAY),
    st.booleans(),
)
@example({"iterations": np.array([1])}, True)
@example({"layers": np.array(1)}, True)
@example({"counts_ILDE": np.array(1, np.int32)}, True)
@examples(150)
def test_loads_of_any_arrays_are_valid_or_refused(content, keep_others: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = write_loads(folder)
        others = rows_in(file) if keep_others else {}
        save_rows(file, **{**others, **{name: np.stack([row] * 3) for name, row in content.items()}})
        loads_or_refusal(file)


def placements_file() -> bytes:
    owned_LED = np.arange(8)[None, :, None] // 2 == np.arange(4)
    tokens_LD = np.arange(4)[None]
    with tempfile.TemporaryDirectory() as folder:
        with closing(PlacementsWriter(folder, [1])) as writer:
            for iteration in (1, 2):
                writer.append(iteration, owned_LED, owned_LED, tokens_LD, tokens_LD)
        return Path(folder, PLACEMENTS_FILE).read_bytes()


def placements_or_refusal(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, PLACEMENTS_FILE)
        file.write_bytes(content)
        try:
            placements = read_placements(folder)
        except ConfigurationError as error:
            refused_in_one_line(error, file)
            return
    shape = (len(placements.iterations), len(placements.layers))
    assert placements.owned_ILED.shape[:2] == placements.present_ILED.shape[:2] == shape
    assert (
        placements.tokens_ILD.shape
        == placements.ep_tokens_ILD.shape
        == (*shape, placements.owned_ILED.shape[3])
    )
    assert min(placements.tokens_ILD.min(), placements.ep_tokens_ILD.min()) >= 0


@given(CHANGES)
@examples(150)
def test_changed_placements_are_valid_or_refused(changes) -> None:
    placements_or_refusal(changed(placements_file(), changes))


PLACEMENT_ARRAYS = ["owned_bits", "present_bits", "ep_tokens_ILD", "tokens_ILD", "iterations", "layers"]


@given(st.dictionaries(st.sampled_from(PLACEMENT_ARRAYS), ANY_ARRAY))
@examples(100)
def test_placements_of_any_arrays_are_valid_or_refused(content) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, PLACEMENTS_FILE)
        file.write_bytes(placements_file())
        save_rows(file, **{**rows_in(file), **{name: np.stack([row] * 2) for name, row in content.items()}})
        placements_or_refusal(file.read_bytes())


def metrics_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        with closing(MetricsWriter(folder)) as writer:
            for iteration in (1, 2, 3):
                layers = tuple(LayerMetrics(layer, 1.5, 1.25, 2, 3, 4, 5, 0.5, 0.25) for layer in (1, 2))
                writer.append(IterationMetrics(iteration, 2.5, 1.0, 0.5, 1e3, layers))
        return Path(folder, METRICS_FILE).read_bytes()


def run_or_refusal(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, METRICS_FILE).write_bytes(content)
        try:
            run = load(Path(folder))
        except ConfigurationError as error:
            refused_in_one_line(error, Path(folder))
            return
        Console(file=io.StringIO(), markup=False).print(comparison_table(run, run))


@given(CHANGES)
@example([(0.0, 0, b'{"iteration": 1e3, ')])
@examples(150)
def test_changed_metrics_are_valid_or_refused(changes) -> None:
    run_or_refusal(changed(metrics_file(), changes))


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just([]) | st.just({})
)


GOOD_VALUES = (
    st.just(0)
    | st.integers(0, (1 << 63) - 1)
    | st.floats(0, allow_infinity=False)
    | st.just(None)
    | st.text(max_size=4)
    | st.lists(st.integers(0, 1 << 40), max_size=3)
)


@given(st.sampled_from(["of the iteration", "of a layer"]), st.data())
@examples(150)
def test_metrics_with_any_value_are_valid_or_refused(where: str, data: st.DataObject) -> None:
    lines = [json.loads(line) for line in metrics_file().splitlines()]
    record = lines[data.draw(st.integers(0, 2))]
    record = record if where == "of the iteration" else record["layers"][1]
    record[data.draw(st.sampled_from(sorted(record)))] = data.draw(VALUES)
    run_or_refusal("\n".join(map(json.dumps, lines)).encode())


@given(st.data())
@examples(60)
def test_a_page_of_any_valid_metrics_can_be_built(data: st.DataObject) -> None:
    """Draws values that the reader mostly accepts, so that most examples reach the page."""
    lines = [json.loads(line) for line in metrics_file().splitlines()]
    records = [record for line in lines for record in (line, line["layers"][1])]
    for _ in range(data.draw(st.integers(1, 4))):
        record = records[data.draw(st.integers(0, len(records) - 1))]
        record[data.draw(st.sampled_from(sorted(record)))] = data.draw(GOOD_VALUES)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, METRICS_FILE).write_text("\n".join(map(json.dumps, lines)))
        try:
            runs = read_reported_runs([Path(folder)])
        except ConfigurationError as error:
            refused_in_one_line(error, Path(folder))
            return
        assert "</html>" in report_page(runs).html


@given(CHANGES)
@examples(100)
def test_a_changed_manifest_is_valid_or_refused(changes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.bin").write_bytes(b"12")
        DataManifest("f", "bpe", 300, 299, 1, 2, {"text.bin": BuiltFile(2, "ab")}).write(Path(folder))
        file = Path(folder, MANIFEST_FILE)
        file.write_bytes(changed(file.read_bytes(), changes))
        try:
            manifest = read_manifest(Path(folder))
        except ConfigurationError as error:
            refused_in_one_line(error, Path(folder))
            return
        assert isinstance(manifest.vocab_size, int)
        assert isinstance(manifest.eod_id, int)
