"""A run's array files with other content are refused with one clear line."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.records.loads import LOADS_FILE, LoadsWriter, read_loads
from megatron_fssdp.records.placements import PLACEMENTS_FILE, PlacementsWriter, read_placements

from ..row_files import rows_in, save_rows

NUM_LAYERS, NUM_DEVICES, NUM_EXPERTS = 2, 3, 4
LAYERS = [1, 3]


def write_loads(folder: Path) -> Path:
    with closing(LoadsWriter(folder, LAYERS)) as writer:
        for iteration in (1, 2):
            counts_LDE = np.full((NUM_LAYERS, NUM_DEVICES, NUM_EXPERTS), 5)
            writer.append(iteration, counts_LDE, np.full((NUM_LAYERS, 2), 7), np.full((NUM_LAYERS, 3), 7))
    return folder / LOADS_FILE


def write_placements(folder: Path) -> Path:
    owned_LED = np.zeros((NUM_LAYERS, NUM_EXPERTS, NUM_DEVICES), np.bool_)
    owned_LED[:, :, 0] = True
    tokens_LD = np.full((NUM_LAYERS, NUM_DEVICES), 7)
    with closing(PlacementsWriter(folder, LAYERS)) as writer:
        for iteration in (1, 2):
            writer.append(iteration, owned_LED, owned_LED, tokens_LD, tokens_LD)
    return folder / PLACEMENTS_FILE


# Each record: what writes it, what reads it, and what opens it again for a resumed run.
RECORDS: dict[str, tuple[Callable, Callable, Callable]] = {
    "loads": (write_loads, read_loads, LoadsWriter),
    "placements": (write_placements, read_placements, PlacementsWriter),
}
ARRAYS = {
    "loads": ("counts_ILDE", "by_nodes_ILN", "by_devices_ILD", "iterations", "layers"),
    "placements": ("owned_bits", "present_bits", "ep_tokens_ILD", "tokens_ILD", "iterations", "layers"),
}
OPTIONAL = ("by_nodes_ILN", "by_devices_ILD")  # Not every run records them.
EACH_ARRAY = [(record, name) for record, names in ARRAYS.items() for name in names]

CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "a dimension more": lambda array: array[:, None],
    "floats": lambda array: array.astype(np.float64),
    "not finite": lambda array: np.full(array.shape, np.nan),
    "complex numbers": lambda array: array.astype(np.complex64),
    "strings": lambda array: array.astype(str),
    "bytes": lambda array: array.astype(bytes),
    "booleans": lambda array: array.astype(np.bool_),
    "dates": lambda array: np.zeros(array.shape, "datetime64[s]"),
    "records": lambda array: np.zeros(array.shape, [("count", np.int32)]),
    "too large integers": lambda array: array.astype(np.uint64),
}


def assert_refused(record: str, file: Path, words: str = "") -> None:
    """The reader and the writer of a resumed run must both refuse the file."""
    _, read, open_writer = RECORDS[record]
    for refuse in (lambda: read(file.parent), lambda: open_writer(file.parent, LAYERS)):
        with pytest.raises(ConfigurationError) as caught:
            refuse()
        message = str(caught.value)
        assert message.startswith(f"{file}: damaged, incomplete or not a record of a run (")
        assert message.endswith("; record the run again")
        assert words in message
        assert len(message.splitlines()) == 1


@pytest.mark.parametrize(("record", "name"), EACH_ARRAY)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_field_of_rows_is_refused(tmp_path: Path, record: str, name: str, change: Callable) -> None:
    file = RECORDS[record][0](tmp_path)
    content = rows_in(file)
    save_rows(file, **{**content, name: change(content[name])})
    assert_refused(record, file, {"owned_bits": "own", "present_bits": "pres"}.get(name, name))


@pytest.mark.parametrize(("record", "name"), [each for each in EACH_ARRAY if each[1] not in OPTIONAL])
def test_a_missing_array_is_named(tmp_path: Path, record: str, name: str) -> None:
    file = RECORDS[record][0](tmp_path)
    content = rows_in(file)
    del content[name]
    save_rows(file, **content)
    assert_refused(record, file, f"got no array {name}; found: ")


@pytest.mark.parametrize(("record", "name"), [case for case in EACH_ARRAY if not case[1].endswith("_bits")])
def test_negative_numbers_are_refused(tmp_path: Path, record: str, name: str) -> None:
    file = RECORDS[record][0](tmp_path)
    content = rows_in(file)
    content[name] = content[name].astype(np.int32)
    content[name].flat[0] = -1
    save_rows(file, **content)
    assert_refused(record, file, name)


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("numbers", [[2, 1], [1, 1], [0, -(2**63)], [-(2**63), 2**63 - 1]], ids=str)
def test_numbers_that_do_not_ascend_are_refused(tmp_path: Path, record: str, numbers: list[int]) -> None:
    file = RECORDS[record][0](tmp_path)
    content = rows_in(file)
    save_rows(file, **{**content, "iterations": np.array(numbers)})
    assert_refused(record, file, "iterations are negative or not ascending")
    save_rows(file, **{**content, "layers": np.array([numbers, numbers])})
    assert_refused(record, file, "layers are negative or not ascending")


@pytest.mark.parametrize("record", RECORDS)
def test_layers_that_differ_between_iterations_are_refused(tmp_path: Path, record: str) -> None:
    file = RECORDS[record][0](tmp_path)
    save_rows(file, **{**rows_in(file), "layers": np.array([[1, 3], [1, 4]])})
    assert_refused(record, file, "the layers differ between iterations")


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("kept", [0, 1, 30, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, record: str, kept: float) -> None:
    file = RECORDS[record][0](tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: kept if isinstance(kept, int) else round(kept * len(content))])
    assert_refused(record, file)


@pytest.mark.parametrize("record", RECORDS)
def test_another_kind_of_file_is_refused(tmp_path: Path, record: str) -> None:
    file = RECORDS[record][0](tmp_path)
    np.save(file, np.arange(8))
    assert_refused(record, file, "the file has no rows of named arrays")
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert_refused(record, file, "the file has no rows of named arrays")
    file.write_bytes(b"text")
    assert_refused(record, file)
    file.unlink()
    file.mkdir()
    assert_refused(record, file)


def test_bits_for_another_number_of_devices_are_refused(tmp_path: Path) -> None:
    file = write_placements(tmp_path)
    content = rows_in(file)
    save_rows(file, **{**content, "owned_bits": np.concatenate([content["owned_bits"]] * 2, axis=-1)})
    assert_refused("placements", file, "owned_bits has 2 bytes for each expert, wanted 1 for 3 devices")
    save_rows(file, **{**content, "owned_bits": content["owned_bits"][:, :, :2]})
    assert_refused("placements", file, "owned_ILED has shape")


@pytest.mark.parametrize("record", RECORDS)
def test_smaller_integers_and_further_arrays_are_accepted(tmp_path: Path, record: str) -> None:
    write, read, _ = RECORDS[record]
    file = write(tmp_path)
    expected = read(tmp_path)
    smaller = {name: array.astype(np.uint8) for name, array in rows_in(file).items()}
    save_rows(file, **{**smaller, "other": np.array(["text"] * 2)})
    found = read(tmp_path)
    assert found.iterations.dtype == np.int64
    for name, array in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), array)
        assert getattr(found, name).dtype == array.dtype
