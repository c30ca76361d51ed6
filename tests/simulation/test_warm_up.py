import pytest

from megatron_fssdp.report.simulation_report import ranking_data
from megatron_fssdp.simulation.replay import warm_up_iterations
from megatron_fssdp.strategies.registry import build_strategy

from .small_jobs import ranking, settings_of


def test_measuring_iterations_do_not_count_in_the_ranking():
    few, many = (ranking("ep", "prophet", num_iterations=number) for number in (5, 30))
    seconds = [[row["iteration_s"] for row in ranking_data(report)["strategies"]] for report in (few, many)]
    assert seconds[0] == pytest.approx(seconds[1])
    prophet, plain = few.ranked
    assert (prophet.label, plain.label) == ("prophet", "ep")
    assert prophet.outcome.warm_up == few.warm_up == 3
    assert few.steady_s(prophet.outcome) < prophet.outcome.mean_s
    shown = [dict(zip(few.table.header, row, strict=True))["warm-up"] for row in few.table.rows]
    assert shown[0].startswith("3 × ")
    assert shown[1] == "–"


def test_a_strategy_that_never_gets_its_turn_is_last_and_says_so():
    report = ranking("flexmoe", "ep", num_iterations=5)
    assert [row.label for row in report.ranked] == ["ep", "flexmoe"]
    assert "all 5" in report.table.rows[-1]
    assert report.warm_up == 0


@pytest.mark.parametrize(
    ("name", "settings", "wanted"),
    [
        ("ep", {}, 0),
        ("fssdp", {}, 3),
        ("fssdp", {"slots": 2, "overlap_degree": 2}, 1),
        ("flexmoe", {"placement_interval": 10}, 10),
        ("smartmoe", {"reshard_interval": 7}, 7),
        ("smartmoe", {"reshard_interval": 50}, 40),
    ],
)
def test_the_warm_up_of_strategies(name, settings, wanted):
    assert warm_up_iterations(build_strategy(name, settings_of(name, **settings)), 40) == wanted
