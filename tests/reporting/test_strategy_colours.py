from megatron_fssdp.config.strategy_registry import STRATEGIES
from megatron_fssdp.reporting.strategy_colours import distinct_colours, strategy_colours


def test_every_strategy_has_a_colour_of_its_own() -> None:
    colours = strategy_colours()
    assert set(colours) == set(STRATEGIES)
    assert len(set(colours.values())) == len(colours)


def test_a_strategy_keeps_its_colour_and_the_others_differ_from_it() -> None:
    found = distinct_colours(["mine", "ep", "fssdp", "ep", "other"])
    assert found[1:3] == [STRATEGIES["ep"].colour, STRATEGIES["fssdp"].colour]
    assert len(set(found)) == 5
    assert len(distinct_colours(["ep"] * 30)) == 30
