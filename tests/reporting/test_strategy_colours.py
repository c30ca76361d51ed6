from megatron_fssdp.config.strategy_selection import SETTINGS_BY_STRATEGY
from megatron_fssdp.reporting.strategy_colours import STRATEGY_COLOURS, distinct_colours


def test_every_strategy_has_a_colour_of_its_own() -> None:
    assert set(STRATEGY_COLOURS) == set(SETTINGS_BY_STRATEGY)
    assert len(set(STRATEGY_COLOURS.values())) == len(STRATEGY_COLOURS)


def test_a_strategy_keeps_its_colour_and_the_others_differ_from_it() -> None:
    found = distinct_colours(["mine", "ep", "fssdp", "ep", "other"])
    assert found[1:3] == [STRATEGY_COLOURS["ep"], STRATEGY_COLOURS["fssdp"]]
    assert len(set(found)) == 5
    assert len(distinct_colours(["ep"] * 30)) == 30
