from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.records.load_sources import read_any_loads
from megatron_fssdp.records.rank_traces import RoutedModel

from .made_traces import EXPERTS, TOP_K, read_lines, write_lines, write_tokens_per_expert, write_traces

SAMPLES = Path(__file__).parent / "megatron_traces"


def read(folder, num_layers, most=None):
    return read_any_loads(folder, RoutedModel(num_layers, EXPERTS, TOP_K), most)


@pytest.mark.parametrize(
    ("sample", "num_stages", "num_devices"), [("pp1_ep2", 1, 2), ("pp1_ep4", 1, 4), ("pp2_ep2", 2, 2)]
)
def test_traces_that_megatron_wrote_are_read(sample, num_stages, num_devices):
    loads, note = read(SAMPLES / sample, 2)
    assert note.endswith(f"pipeline stages: {num_stages}, devices of each: {num_devices}")
    assert loads.iterations.tolist() == [1, 2]
    # 8 sequences of 8 tokens, in equal numbers on every device.
    assert (loads.counts_ILDE.sum(axis=3) == 8 * 8 * TOP_K // num_devices).all()
    assert (loads.counts_ILDE.max(axis=(1, 3)) > 0).all()


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("layers_of_stages", [[2], [2, 2], [1, 3], [0, 2], [1, 2, 1]])
def test_ranks_are_mapped_to_stages_and_devices(layers_of_stages, num_devices, tmp_path):
    counts_ILDE = write_traces(tmp_path, layers_of_stages, num_devices)
    loads, _ = read(tmp_path, sum(layers_of_stages))
    np.testing.assert_array_equal(loads.counts_ILDE, counts_ILDE)
    assert loads.layers.tolist() == list(range(1, 1 + sum(layers_of_stages)))


@pytest.mark.parametrize(("group", "copies"), [(1, 2), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("layers_of_stages", [[2], [2, 1]])
def test_tokens_per_expert_are_put_together(layers_of_stages, group, copies, tmp_path):
    counts_ILE = write_tokens_per_expert(tmp_path, layers_of_stages, group, copies)
    for folder in (tmp_path, tmp_path / "tokens_per_expert"):
        loads, note = read(folder, sum(layers_of_stages))
        np.testing.assert_array_equal(loads.counts_ILDE, counts_ILE[:, :, None])
        assert loads.iterations.tolist() == [10, 20]
        assert "not every iteration" in note


def test_iterations_with_evaluations_are_left_out(tmp_path):
    counts_ILDE = write_traces(tmp_path, [2], 2, passes=(4, 4, 6, 4))
    loads, note = read(tmp_path, 2)
    assert loads.iterations.tolist() == [1, 2, 4]
    np.testing.assert_array_equal(loads.counts_ILDE, counts_ILDE[[0, 1, 3]])
    assert "left out: 1 iterations" in note


def test_recomputed_passes_are_counted_once(tmp_path):
    """Passes of an evaluation are not recomputed."""
    counts_ILDE = write_traces(tmp_path, [2], 2, passes=(4, 4, 6, 4))
    for file in tmp_path.glob("*.jsonl"):
        lines, seen = [], Counter[tuple[int, int]]()
        for line in read_lines(file):
            place = line["step"], line["layer"]
            lines += [line] if seen[place] >= 4 else [line, line]
            seen[place] += 1
        write_lines(file, lines)
    loads, note = read(tmp_path, 2)
    assert "every pass is there twice" in note
    np.testing.assert_array_equal(loads.counts_ILDE, counts_ILDE[[0, 1, 3]])


def test_layers_of_predicted_tokens_are_left_out(tmp_path):
    counts_ILDE = write_traces(tmp_path, [2], 1)
    file = tmp_path / "router_trace_rank0.jsonl"
    lines = read_lines(file)
    predicted = {**lines[0], "block": "mtp", "mtp_idx": 0}
    write_lines(file, [predicted, *lines])
    np.testing.assert_array_equal(read(tmp_path, 2)[0].counts_ILDE, counts_ILDE)


def test_only_the_first_iterations_of_a_killed_run_are_read(tmp_path):
    counts_ILDE = write_traces(tmp_path, [2], 2, passes=(3, 3, 3))
    file = tmp_path / "router_trace_rank1.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ConfigurationError, match=r"rank1.jsonl: line 18: "):
        read(tmp_path, 2)
    loads, _ = read(tmp_path, 2, most=2)
    np.testing.assert_array_equal(loads.counts_ILDE, counts_ILDE[:2])


def change(number, **values):
    return lambda lines: [*lines[: number - 1], {**lines[number - 1], **values}, *lines[number:]]


PROBLEMS = {
    "rank3.jsonl: line 3: got top-2 on rank 1, wanted top-2 on rank 3": change(3, rank=1),
    "rank3.jsonl: line 3: got top-3": change(3, topk=3),
    "rank3.jsonl: line 2: got experts 0 to 4, wanted 0 to 3": change(2, top_indices=[[0, 4]] * 16),
    "rank3.jsonl: line 2: got experts -1 to 2": change(2, top_indices=[[2, -1]] * 16),
    "rank3.jsonl: line 2: .*inhomogeneous": change(2, top_indices=[[0, 1]] * 15 + [[1]]),
    "rank3.jsonl: line 2: cannot reshape": change(2, top_indices=[[0, 1]] * 15),
    "rank3.jsonl: line 5: top_indices: ": change(5, top_indices=None),
    "rank3.jsonl: line 5: block: ": change(5, block="encoder"),
    "rank3.jsonl: line 8: got iteration 1 after 2": lambda lines: [*lines, lines[0]][-8:],
    "rank3.jsonl: got 2 and 3 passes of layers in iteration 1, wanted 3": lambda lines: lines[1:],
    "rank3.jsonl: got 0 passes of layers in iteration 2, wanted 3": lambda lines: lines[:6],
    "got 1, 1, 1, 2 MoE layers on its ranks": lambda lines: [
        {**line, "layer": layer} for line in lines for layer in (0, 1)
    ],
}


@pytest.mark.parametrize("words", PROBLEMS)
def test_traces_that_are_damaged_or_mixed_are_refused_in_one_line(words, tmp_path):
    layers = [1, 1] if "MoE layers on" in words else [2, 2]
    write_traces(tmp_path, layers, 2)
    file = tmp_path / "router_trace_rank3.jsonl"
    write_lines(file, PROBLEMS[words](read_lines(file)))
    with pytest.raises(ConfigurationError, match=words) as caught:
        read(tmp_path, sum(layers))
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "words"),
    [
        (3, EXPERTS, "wanted a model's 3"),
        (1, EXPERTS, "wanted a model's 1"),
        (2, 8, "no token of an expert after 3"),
    ],
)
def test_traces_of_another_model_are_refused(num_layers, num_experts, words, tmp_path):
    write_traces(tmp_path, [2], 2)
    with pytest.raises(ConfigurationError, match=words):
        read_any_loads(tmp_path, RoutedModel(num_layers, num_experts, TOP_K))


def test_missing_and_mixed_files_are_refused(tmp_path):
    write_traces(tmp_path, [2], 4)
    (tmp_path / "router_trace_rank2.jsonl").unlink()
    with pytest.raises(ConfigurationError, match="no file of rank 2"):
        read(tmp_path, 2)
    write_traces(tmp_path, [2], 4)
    write_tokens_per_expert(tmp_path, [2], 2, 1)
    with pytest.raises(ConfigurationError, match=r"has router_trace.* and tokens_per_expert"):
        read(tmp_path, 2)
    for path in tmp_path.glob("*.jsonl"):
        path.write_text("")
    (tmp_path / "tokens_per_expert").rename(tmp_path / "other")
    with pytest.raises(ConfigurationError, match="no line of an MoE layer"):
        read(tmp_path, 2)
    write_traces(tmp_path, [2], 1, passes=(3, 0, 3))
    with pytest.raises(ConfigurationError, match="got 2 of iterations 1 to 3"):
        read(tmp_path, 2)


def test_equal_counts_of_two_ranks_are_refused(tmp_path):
    """As under expert tensor parallelism, of which the files say nothing."""
    write_tokens_per_expert(tmp_path, [2], 2, 2)
    folder = tmp_path / "tokens_per_expert"
    (folder / "rank1.jsonl").write_bytes((folder / "rank0.jsonl").read_bytes())
    with pytest.raises(ConfigurationError, match="expert tensor parallelism"):
        read(tmp_path, 2)
    lines = read_lines(folder / "rank0.jsonl")
    write_lines(folder / "rank0.jsonl", [*lines, lines[-1]])
    with pytest.raises(ConfigurationError, match=r"rank0.jsonl: line 5: got iteration 20 after 20"):
        read(tmp_path, 2)
