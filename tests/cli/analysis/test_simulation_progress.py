"""A long simulation says how far it is, on a terminal and in a log."""

import io

import numpy as np
import pytest
from rich.console import Console

from megatron_fssdp.cli.analysis import simulation_progress
from megatron_fssdp.cli.analysis.simulation_progress import SimulationProgress
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan

PLAN = LayerPlan.owners_only(LayerContext(1, np.zeros(2, np.int64), Topology.uniform(2, 1)))


def shown(seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> str:
    """What stands in a log if plans are made at these times."""
    times = iter([0.0, *seconds])
    monkeypatch.setattr(simulation_progress.time, "monotonic", lambda: next(times))
    text = io.StringIO()
    with SimulationProgress(Console(file=text), num_iterations=50, num_strategies=3) as progress:
        progress.begin("ep")
        progress.begin("fssdp")
        for iteration in range(len(seconds)):
            progress.planned(iteration, 0, PLAN)
    return text.getvalue()


def test_a_log_gets_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown([1, 9, 11, 15, 22], monkeypatch).splitlines() == [
        "fssdp (2 of 3 strategies): iteration 3/50",
        "fssdp (2 of 3 strategies): iteration 5/50",
    ]


def test_a_short_simulation_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown([0.1, 0.2], monkeypatch) == ""


def test_a_terminal_shows_one_live_line() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True)
    with SimulationProgress(console, num_iterations=50, num_strategies=1) as progress:
        progress.begin("fssdp")
        progress.planned(0, 0, PLAN)
        progress.search("fssdp")
        progress.planned(0, 0, PLAN)


def test_a_long_search_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 11.0, 12.0, 30.0])
    monkeypatch.setattr(simulation_progress.time, "monotonic", lambda: next(times))
    text = io.StringIO()
    with SimulationProgress(Console(file=text), num_iterations=50, num_strategies=1) as progress:
        progress.begin("fssdp")
        progress.search("fssdp")
        for _ in range(3):
            progress.planned(0, 0, PLAN)
    assert text.getvalue().splitlines() == [
        f"fssdp (1 of 1 strategies): searching where it pays ({count} layers planned)" for count in (1, 3)
    ]
