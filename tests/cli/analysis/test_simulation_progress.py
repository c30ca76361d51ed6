"""A long simulation says how far it is, on a terminal and in a log."""

import io

import numpy as np
import pytest
from megatron_fssdp.cli.analysis.simulation_progress import SimulationProgress
from rich.console import Console

from megatron_fssdp.cli.analysis import simulation_progress
from megatron_fssdp.planning.placement.topology import Topology
from megatron_fssdp.strategies.layer_plan import LayerContext, LayerPlan

PLAN = LayerPlan.owners_only(LayerContext(1, np.zeros(2, np.int64), Topology.uniform(2, 1)))


@pytest.mark.parametrize(
    ("searches", "seconds", "wanted"),
    [
        (False, [1, 9, 11, 15, 22], ["iteration 3/50", "iteration 5/50"]),
        (False, [0.1, 0.2], []),
        (True, [11, 12, 30], [f"searching where it pays ({count} layers planned)" for count in (1, 3)]),
    ],
)
def test_a_log_gets_a_line_every_ten_seconds(
    searches: bool, seconds: list[float], wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, *seconds])
    monkeypatch.setattr(simulation_progress.time, "monotonic", lambda: next(times))
    text = io.StringIO()
    with SimulationProgress(Console(file=text), num_iterations=50, num_strategies=3) as progress:
        progress.begin("ep", 1)
        progress.begin("fssdp", 2, searches=searches)
        for iteration in range(len(seconds)):
            progress.planned(iteration, 0, PLAN)
    assert text.getvalue().splitlines() == [f"fssdp (2 of 3 strategies): {line}" for line in wanted]


def test_a_terminal_shows_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation_progress, "_LIVE_INTERVAL_S", 0)
    text = io.StringIO()
    console = Console(file=text, force_terminal=True)
    with SimulationProgress(console, num_iterations=50, num_strategies=1) as progress:
        progress.begin("fssdp", 1)
        progress.planned(0, 0, PLAN)
        console.print("beside it")
    assert "fssdp (1 of 1 strategies): iteration 1/50" in text.getvalue()
