import multiprocessing
import time
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.records.growing_arrays import GrowingArrays, read_arrays
from tests.full_disk import room_for

LAYERS = np.array([2, 5])
FORMATS = {"values": 3}


def values(iteration, num_numbers=3):
    """Numbers that only this iteration has, and that show a row mixed from two iterations."""
    return np.full((len(LAYERS), num_numbers), iteration, np.int64)


def read(folder):
    return SimpleNamespace(**read_arrays(folder / "values.npy", FORMATS))


class Writer(GrowingArrays):
    """Continues what is there."""

    def __init__(self, path):
        super().__init__(path, LAYERS.tolist(), read)

    def add(self, *iterations, num_numbers=3):
        for iteration in iterations:
            self.append_row(iteration, {"values": values(iteration, num_numbers)})


def checked(path):
    """Read the file; every row must be whole. Return the iterations."""
    arrays = read_arrays(path, FORMATS)
    assert np.array_equal(arrays["layers"], LAYERS)
    wanted = np.broadcast_to(arrays["iterations"][:, None, None], arrays["values"].shape)
    assert (arrays["values"] == wanted).all()
    return arrays["iterations"].tolist()


def test_every_iteration_is_in_the_file_at_once_and_numpy_reads_it(tmp_path):
    path = tmp_path / "run" / "values.npy"
    writer = Writer(path)
    for iteration in range(1, 12):  # the number of rows gets a second digit
        writer.add(iteration)
        assert checked(path) == list(range(1, iteration + 1))
    rows = np.load(path)
    assert rows["values"].shape == (11, 2, 3)
    assert rows["iterations"].tolist() == list(range(1, 12))
    assert [file.name for file in path.parent.iterdir()] == ["values.npy"]


def test_an_iteration_adds_its_own_bytes_and_a_full_disk_changes_nothing(tmp_path):
    path = tmp_path / "values.npy"
    writer = Writer(path)
    writer.add(1, num_numbers=1000)
    before = path.stat()
    writer.add(*range(2, 30), num_numbers=1000)
    after = path.stat()
    assert (after.st_ino, after.st_size - before.st_size) == (before.st_ino, 28 * np.load(path).itemsize)
    too_large = pytest.raises(ConfigurationError, match="cannot be written \\(File too large\\)")
    with room_for(after.st_size + 5), too_large:
        writer.add(30, num_numbers=1000)
    assert checked(path) == list(range(1, 30))
    writer.add(30, num_numbers=1000)
    assert checked(path) == list(range(1, 31))


@pytest.mark.parametrize("is_resumed", [True, False])
@pytest.mark.parametrize("again_from", [1, 2, 4, 5])
def test_a_repeated_iteration_replaces_itself_and_all_later_ones(tmp_path, again_from, is_resumed):
    path = tmp_path / "values.npy"
    writer = Writer(path)
    writer.add(1, 2, 3, 4)
    if is_resumed:
        writer = Writer(path)
    writer.add(again_from, 9)
    assert checked(path) == [*range(1, again_from), again_from, 9]


def _append_many(path, first):
    writer = Writer(path)
    for iteration in range(first, first + 200):  # a test that fails must not fill the disk
        writer.add(iteration, num_numbers=6_000)  # rows of many pages
        time.sleep(0.0005)  # without it, the file grows faster than it can be read


def test_a_killed_run_keeps_all_complete_iterations(tmp_path):
    """Kill a writer at any moment, again and again, and read its file while it writes."""
    path = tmp_path / "values.npy"
    last = 0
    rng = np.random.default_rng(0)
    for _ in range(4):
        writer = multiprocessing.get_context("fork").Process(target=_append_many, args=(path, last + 1))
        writer.start()
        try:
            is_alive = True
            while not path.exists() or checked(path)[-1] < last + 3:  # reads beside the writer
                assert is_alive
                is_alive = writer.is_alive()
            time.sleep(rng.uniform(0.0, 0.005))
            seen = checked(path)[-1]
        finally:
            writer.kill()
            writer.join()
        iterations = checked(path)
        assert iterations == list(range(1, len(iterations) + 1))
        assert iterations[-1] >= seen
        last = iterations[-1]


def test_other_layers_names_and_shapes_are_refused(tmp_path):
    path = tmp_path / "values.npy"
    writer = Writer(path)
    writer.add(1)
    with pytest.raises(ConfigurationError, match=r"holds .*\(2, 3\).*, but .* \(2, 4\).* choose another"):
        writer.add(2, num_numbers=4)
    with pytest.raises(ConfigurationError, match=r"run records .*others.*; choose another output folder"):
        writer.append_row(2, {"others": values(2)})
    assert checked(path) == [1]
    with pytest.raises(ConfigurationError, match=r"holds layers \[2, 5\], but this run records \[2\]"):
        GrowingArrays(path, [2], read)
