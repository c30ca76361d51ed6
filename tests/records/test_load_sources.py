import csv

import numpy as np
import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.records.load_sources import read_any_loads
from megatron_fssdp.records.loads import LOADS_FILE, LoadsWriter
from megatron_fssdp.records.rank_traces import RoutedModel

COUNTS = np.random.default_rng(0).integers(0, 50, (3, 2, 4, 5))  # [I, L, D, E]


def read(path):
    loads, note = read_any_loads(path, RoutedModel(2, 5, 2))
    assert not note
    return loads


@pytest.mark.parametrize(
    ("array", "wanted"),
    [
        (COUNTS, COUNTS),
        (COUNTS.astype(np.float32), COUNTS),
        (COUNTS.sum(axis=2), COUNTS.sum(axis=2, keepdims=True)),
        (np.stack([COUNTS, 2 * COUNTS], axis=1), 3 * COUNTS),
    ],
    ids=["ILDE", "whole floats", "ILE", "IZLDE"],
)
def test_arrays_are_read(array, wanted, tmp_path):
    np.save(tmp_path / "x.npy", array)
    loads = read(tmp_path / "x.npy")
    np.testing.assert_array_equal(loads.of_whole_iterations().counts_ILDE, wanted)
    assert loads.counts_ILDE.ndim == max(array.ndim, 4), "micro-batches keep their axis"
    assert (loads.iterations.tolist(), loads.layers.tolist()) == ([1, 2, 3], [1, 2])


def test_a_copy_of_the_file_of_a_run_is_read(tmp_path):
    LoadsWriter(tmp_path / "run", [2, 4]).append(7, COUNTS[0])
    loads = read((tmp_path / "run" / LOADS_FILE).rename(tmp_path / "copy.npy"))
    np.testing.assert_array_equal(loads.counts_ILDE, COUNTS[:1])
    assert (loads.iterations.tolist(), loads.layers.tolist()) == ([7], [2, 4])


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (COUNTS[0, 0], r"got int64 \[4, 5\]"),
        (COUNTS[:0], r"got int64 \[0, 2, 4, 5\]"),
        (COUNTS - 1, "wanted whole numbers"),
        (COUNTS + 0.5, "wanted whole numbers"),
        (COUNTS * np.nan, "wanted whole numbers"),
        (COUNTS.astype(str), "got <U"),
        (COUNTS + 2**40, "wanted whole numbers"),
    ],
)
def test_other_arrays_are_refused(array, words, tmp_path):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ConfigurationError, match=rf"x\.npy: .*{words}"):
        read(tmp_path / "x.npy")
    (tmp_path / "x.npy").write_bytes(b"damaged")
    with pytest.raises(ConfigurationError, match=r"x\.npy: "):
        read(tmp_path / "x.npy")


def test_a_table_is_read_in_any_order_of_its_columns(tmp_path):
    for columns in ("iteration,layer,device,expert,tokens", "tokens,expert,layer,iteration,device"):
        with (tmp_path / "x.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, columns.split(","))
            table.writeheader()
            for (i, layer, device, expert), tokens in np.ndenumerate(COUNTS):
                cells = {"iteration": 10 * i, "layer": layer + 1, "device": device, "expert": expert}
                if tokens:
                    table.writerow({**cells, "tokens": tokens})
        loads = read(tmp_path / "x.csv")
        np.testing.assert_array_equal(loads.counts_ILDE, COUNTS)
        assert (loads.iterations.tolist(), loads.layers.tolist()) == ([0, 10, 20], [1, 2])
    (tmp_path / "x.csv").write_text("iteration,layer,expert,tokens\n1,1,4,7\n1,1,0,3\n")
    assert read(tmp_path / "x.csv").counts_ILDE.tolist() == [[[[3, 0, 0, 0, 7]]]]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("", "line 1: got no column iteration"),
        ("iteration,layer,expert\n", "line 1: got no column tokens"),
        ("iteration,layer,expert,tokens\n", "line 1: got no expert after 0"),
        ("iteration,layer,expert,tokens\n1,1,4,1\n1,1,5,1\n", "line 3: got expert 5, wanted 0 to 4"),
        ("iteration,layer,expert,tokens\n1,1,3,1\n", "line 2: got no expert after 3, wanted 5"),
        ("iteration,layer,expert,tokens\n1,1,4,1\n1,1,4,1\n", "line 3: got expert 4 .*again"),
        ("iteration,layer,expert,tokens\n1,1,4,-1\n", "line 2: got tokens '-1', wanted a whole number"),
        ("iteration,layer,expert,tokens\n1,1,4,x\n", "line 2: got tokens 'x', wanted a whole"),
        ("iteration,layer,expert,tokens\n1,1,4\n", "line 2: got tokens '', wanted a whole"),
        ("iteration,layer,expert,tokens\n1,1,0,4,9\n", "line 2: got more cells than"),
        ('iteration,layer,expert,tokens\n1,1,4,"1\n', "line 1: unexpected end of data"),
    ],
)
def test_a_wrong_table_is_refused_with_its_line(rows, words, tmp_path):
    (tmp_path / "x.csv").write_text(rows)
    with pytest.raises(ConfigurationError, match=f"x.csv: {words}") as caught:
        read(tmp_path / "x.csv")
    assert len(str(caught.value).splitlines()) == 1
