import dataclasses

import numpy as np
import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.records import loads as loads_module
from megatron_fssdp.records.loads import (
    LOADS_FILE,
    MICRO_BATCH_LOADS_FILE,
    LoadsWriter,
    MicroBatchLoadsWriter,
    read_loads,
    read_micro_batch_loads,
)
from megatron_fssdp.records.placements import PLACEMENTS_FILE, PlacementsWriter, read_placements

LAYERS = [1, 3]
NUM_EXPERTS, NUM_DEVICES = 5, 11  # 11 devices do not fill a whole number of bytes


def counts(seed):
    return np.random.default_rng(seed).integers(0, 1000, (2, NUM_DEVICES, NUM_EXPERTS))


def write_loads(folder):
    writer = LoadsWriter(folder, LAYERS)
    for iteration in (1, 2):
        writer.append(iteration, counts(iteration), np.full((2, 2), 7), np.full((2, 3), 7))
    return folder / LOADS_FILE


def single(*numbers, seed=0):
    """Counts of so many micro-batches, of each layer."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 1000, (num, NUM_DEVICES, NUM_EXPERTS)) for num in numbers]


def write_micro_batches(folder):
    writer = MicroBatchLoadsWriter(folder, LAYERS)
    for iteration in (1, 2):
        writer.append(iteration, single(3, 3, seed=iteration))
    return folder / MICRO_BATCH_LOADS_FILE


def placed(seed):
    rng = np.random.default_rng(seed)
    owned_LED = rng.integers(0, NUM_DEVICES, (2, NUM_EXPERTS))[:, :, None] == np.arange(NUM_DEVICES)
    present_LED = owned_LED | (rng.random(owned_LED.shape) < 0.3)
    return (owned_LED, present_LED, *rng.integers(0, 1000, (2, 2, NUM_DEVICES)))


def write_placements(folder):
    writer = PlacementsWriter(folder, LAYERS)
    for iteration in (1, 2):
        writer.append(iteration, *placed(iteration))
    return folder / PLACEMENTS_FILE


# Each record: what writes it, what reads it, and what opens it again for a resumed run.
RECORDS = {
    "loads": (write_loads, read_loads, LoadsWriter),
    "micro-batches": (write_micro_batches, read_micro_batch_loads, MicroBatchLoadsWriter),
    "placements": (write_placements, read_placements, PlacementsWriter),
}


def test_a_resumed_run_replaces_what_it_repeats(tmp_path):
    write_loads(tmp_path)
    write_placements(tmp_path)
    loads = LoadsWriter(tmp_path, LAYERS)
    placements = PlacementsWriter(tmp_path, LAYERS)
    for iteration, seed in ((2, 22), (3, 3)):
        loads.append(iteration, counts(seed), np.full((2, 2), 7), np.full((2, 3), 7))
        placements.append(iteration, *placed(seed))
    recorded, shown = read_loads(tmp_path), read_placements(tmp_path)  # while the run continues
    assert recorded.iterations.tolist() == shown.iterations.tolist() == [1, 2, 3]
    for i, seed in enumerate((1, 22, 3)):
        np.testing.assert_array_equal(recorded.counts_ILDE[i], counts(seed))
        for name, wanted in zip(vars(shown), placed(seed), strict=False):
            np.testing.assert_array_equal(getattr(shown, name)[i], wanted)
    assert shown.most_replicas == NUM_EXPERTS * NUM_DEVICES - NUM_EXPERTS


def test_iterations_are_sliced_in_every_array(tmp_path):
    write_loads(tmp_path)
    loads = read_loads(tmp_path)
    last = loads.of_iterations(slice(-1, None))
    for field in dataclasses.fields(loads):
        whole, part = getattr(loads, field.name), getattr(last, field.name)
        np.testing.assert_array_equal(part, whole if field.name == "layers" else whole[1:])


def check_micro_batches(folder, wanted):
    loads = read_micro_batch_loads(folder)
    assert loads.iterations.tolist() == list(wanted)
    for counts_ZLDE, counts_LZDE in zip(loads.counts_IZLDE, wanted.values(), strict=True):
        for layer, counts_ZDE in enumerate(counts_LZDE):
            np.testing.assert_array_equal(counts_ZLDE[: len(counts_ZDE), layer], counts_ZDE)
            assert not counts_ZLDE[len(counts_ZDE) :, layer].any()


def test_iterations_have_other_numbers_of_micro_batches_one_or_unknown_ones(tmp_path):
    writer, wanted = MicroBatchLoadsWriter(tmp_path, LAYERS), dict[int, list[np.ndarray]]()
    for iteration, numbers in enumerate([(1, 1), (3, 3), (2, 0), (1, 1), (), (0, 3)], start=1):
        counts_LZDE = single(*numbers, seed=iteration)
        writer.append(iteration, counts_LZDE)
        if max(numbers, default=0) > 1:
            wanted[iteration] = counts_LZDE
    check_micro_batches(tmp_path, wanted)
    longer = single(5, 5)
    writer.append(7, longer)  # does not fit into the rows
    check_micro_batches(tmp_path, {7: longer})


@pytest.mark.parametrize("numbers", [(1, 1), (), (2, 2)])
def test_a_resumed_run_keeps_none_that_it_repeats(tmp_path, numbers):
    write_micro_batches(tmp_path)
    again = single(*numbers, seed=9)
    MicroBatchLoadsWriter(tmp_path, LAYERS).append(2, again)
    check_micro_batches(tmp_path, {1: single(3, 3, seed=1)} | ({2: again} if numbers == (2, 2) else {}))
    MicroBatchLoadsWriter(tmp_path, LAYERS).append(1, [])
    assert not (tmp_path / MICRO_BATCH_LOADS_FILE).exists()


def test_large_files_have_fewer_and_fewer_stretches_of_iterations(tmp_path, monkeypatch):
    counts_LZDE = single(2, 2)
    num_bytes = 4 * sum(counts_ZDE.size for counts_ZDE in counts_LZDE)
    monkeypatch.setattr(loads_module, "MOST_BYTES", 24 * num_bytes)
    writer = MicroBatchLoadsWriter(tmp_path, LAYERS)
    for iteration in range(1, 401):
        writer.append(iteration, counts_LZDE)
    stretches = (read_micro_batch_loads(tmp_path).iterations - 1).reshape(-1, loads_module.STRETCH)
    assert (np.diff(stretches, axis=1) == 1).all()
    assert (stretches[:, 0] // loads_module.STRETCH).tolist() == [0, 1, 2, 4, 8, 16, 32]


def change_counts(rows, change):
    names = "counts_ILDE", "counts_IZLDE", "tokens_ILD"
    rows.update({name: change(rows[name]) for name in names if name in rows})


CHANGES = {
    "counts .* dimensions": lambda rows: change_counts(rows, lambda array: array[:, None]),
    "data type float64": lambda rows: rows.update(iterations=rows["iterations"] * 1.0),
    "data type uint64": lambda rows: rows.update(iterations=rows["iterations"].astype(np.uint64)),
    "got no array layers": lambda rows: rows.pop("layers"),
    "iterations are not ascending": lambda rows: rows.update(iterations=np.array([2, 1])),
    "layers are not ascending": lambda rows: rows.update(layers=np.array([[3, 1]] * 2)),
    "layers differ between iterations": lambda rows: rows.update(layers=np.array([[1, 3], [1, 4]])),
    "negative numbers": lambda rows: change_counts(rows, np.negative),
}


def save_rows(file, **content):
    """Write arrays as rows; their first dimensions must be equal."""
    rows = np.zeros(2, [(name, array.dtype, array.shape[1:]) for name, array in content.items()])
    for name, array in content.items():
        rows[name] = array
    np.save(file, rows)


def rows_in(file):
    rows = np.load(file)
    return {name: rows[name].copy() for name in rows.dtype.names}


def assert_refused(record, file, words=None):
    """The reader and the writer of a resumed run must both refuse the file."""
    _, read, open_writer = RECORDS[record]
    for refuse in (lambda: read(file.parent), lambda: open_writer(file.parent, LAYERS)):
        with pytest.raises(ConfigurationError, match=words) as caught:
            refuse()
        message = str(caught.value)
        assert message.startswith(f"{file}: damaged, incomplete or not a record of a run (")
        assert len(message.splitlines()) == 1


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("words", CHANGES)
def test_changed_rows_are_refused(tmp_path, record, words):
    file = RECORDS[record][0](tmp_path)
    content = rows_in(file)
    CHANGES[words](content)
    save_rows(file, **content)
    assert_refused(record, file, words.partition(" .*")[2] or words)


@pytest.mark.parametrize("record", RECORDS)
def test_other_kinds_of_files_are_refused(tmp_path, record):
    file = RECORDS[record][0](tmp_path)
    content = file.read_bytes()
    for kept in (0, 1, 30, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:kept])
        assert_refused(record, file)
    np.save(file, np.arange(8))
    assert_refused(record, file, "the file has no rows of named arrays")
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert_refused(record, file)
    file.unlink()
    with pytest.raises(ConfigurationError, match="no such file"):
        RECORDS[record][1](tmp_path)


def test_placements_that_contradict_themselves_are_refused(tmp_path):
    file = write_placements(tmp_path)
    content = rows_in(file)
    save_rows(file, **{**content, "owned_bits": np.concatenate([content["owned_bits"]] * 2, axis=-1)})
    assert_refused("placements", file, "owned_bits has shape .* for 11 devices")
    save_rows(file, **{**content, "present_bits": 0 * content["present_bits"]})
    assert_refused("placements", file, "not present on its owner")
