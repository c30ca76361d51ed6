import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.records.loads import RecordedLoads
from megatron_fssdp.report.colours import TIME_PARTS, distinct_colours
from megatron_fssdp.report.figures import binned
from megatron_fssdp.report.load_sections import expert_load_section
from megatron_fssdp.report.units import format_bytes, format_flops, format_memory, format_seconds
from megatron_fssdp.simulation.lanes import PARTS


@given(st.integers(1, 400), st.integers(1, 60), st.integers(0, 1000))
def test_bins_fit_the_available_room_and_keep_the_mean(count, most, start):
    values = np.random.default_rng(count).random((count, 2))
    middles, means = binned(np.arange(start, start + count), values, most)
    assert len(middles) == len(means) <= most
    sizes = np.full(len(means), -(-count // most))
    sizes[-1] = count - sizes[:-1].sum()
    np.testing.assert_allclose((means * sizes[:, None]).sum(axis=0), values.sum(axis=0), rtol=1e-5)
    assert (np.diff(middles) > 0).all()


def test_unknown_values_are_left_out_of_the_mean():
    _, means = binned(np.arange(6), np.array([1.0, np.nan, 3.0, 5.0, np.nan, np.nan]), 3)
    np.testing.assert_array_equal(means, [1.0, 4.0, np.nan])


def test_loads_of_micro_batches_are_shown_by_iteration():
    counts_IZLDE = np.random.default_rng(0).integers(0, 9, (3, 2, 2, 4, 8))
    made = RecordedLoads(counts_IZLDE, np.arange(3), np.arange(2))
    shown = [expert_load_section({"x": run}).parts[0].to_json() for run in (made, made.of_whole_iterations())]
    assert shown[0] == shown[1]


def test_numbers_have_the_unit_in_which_they_are_at_least_one():
    texts = [format_bytes(number) for number in (0, 999, 1000, 2.5e6, 4e15)]
    assert texts == ["0 B", "999 B", "1 kB", "2.5 MB", "4,000 TB"]
    assert [format_flops(n) for n in (1.51e8, 2e14)] == ["151 MFLOP/s", "200 TFLOP/s"]
    assert [format_seconds(n) for n in (0, 3.86e-5, 0.0088, 2)] == ["0 µs", "38.6 µs", "8.8 ms", "2 s"]
    assert [format_memory(n) for n in (2**20, 3 * 2**30)] == ["1 MiB", "3 GiB"]


def test_every_strategy_and_part_of_time_has_a_colour_of_its_own():
    colours = [entry.colour for entry in STRATEGIES.values()]
    assert len(set(colours) - {None}) == len(colours)
    distinct = distinct_colours(["mine", "ep", "fssdp", "ep", "other"])
    assert distinct[1:3] == [STRATEGIES["ep"].colour, STRATEGIES["fssdp"].colour]
    assert len(set(distinct)) == 5
    assert len(distinct_colours(["ep"] * 30)) == 30
    assert set(PARTS) <= set(TIME_PARTS)
    assert len({part.name for part in TIME_PARTS.values()}) == len(TIME_PARTS)
    assert len({part.colour for part in TIME_PARTS.values()}) == len(TIME_PARTS)
