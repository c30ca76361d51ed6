from megatron_fssdp.reporting.records.time_parts import MEASURED_PARTS, PASS_PARTS

from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES
from megatron_fssdp.report.colours import TIME_PARTS, distinct_colours, strategy_colours
from megatron_fssdp.simulation.lanes import PARTS


def test_every_strategy_has_a_colour_of_its_own() -> None:
    colours = strategy_colours()
    assert set(colours) == set(STRATEGIES)
    assert len(set(colours.values())) == len(colours)


def test_a_strategy_keeps_its_colour_and_the_others_differ_from_it() -> None:
    found = distinct_colours(["mine", "ep", "fssdp", "ep", "other"])
    assert found[1:3] == [STRATEGIES["ep"].colour, STRATEGIES["fssdp"].colour]
    assert len(set(found)) == 5
    assert len(distinct_colours(["ep"] * 30)) == 30


def test_parts_of_time_have_one_name_and_colour_wherever_they_come_from() -> None:
    assert set(TIME_PARTS) == {*PARTS, *MEASURED_PARTS, *PASS_PARTS}
    assert len({part.name for part in TIME_PARTS.values()}) == len(TIME_PARTS)
    assert len({part.colour for part in TIME_PARTS.values()}) == len(TIME_PARTS)
