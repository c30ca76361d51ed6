"""The first sentence of a simulation's page states the result, also where no strategy is faster or fits."""

import numpy as np
from megatron_fssdp.reporting.simulation_page.simulation_headline import simulation_headline

from megatron_fssdp.cli.analysis.strategy_ranking import ranked_strategies
from megatron_fssdp.records.loads import RecordedLoads
from megatron_fssdp.report.simulations.simulation_report import SimulationReport

from ...simulation.small_jobs import cluster_of, job_of, settings_of


def ranking(*names: str, popular: int = 100, **cluster: object) -> SimulationReport:
    """Simulate strategies on loads in which one expert has ``popular`` tokens of each device, others 4."""
    counts_DE = np.full((4, 8), 4, np.int32)
    counts_DE[:, 0] = popular
    counts_ILDE = np.broadcast_to(counts_DE, (12, 1, 4, 8)).copy()
    record = RecordedLoads(counts_ILDE, np.arange(1, 13), np.array([1]))
    job = job_of(devices=4, experts=8, tokens_per_micro_batch=128)
    settings = {name: settings_of(name) for name in names}
    return ranked_strategies("", record, cluster_of(nodes=2, **cluster), job, settings)


def test_a_faster_strategy_is_named_with_its_factor_and_loads() -> None:
    report = ranking("ep", "prophet")
    best, plain = report.ranked
    assert best.label == "prophet"
    headline = simulation_headline(report)
    ratio = report.plain_s / report.steady_s(best.outcome)
    load = f"{report.steady_load(plain.outcome):.2f} → {report.steady_load(best.outcome):.2f} × mean load"
    assert headline.sentence.startswith(f"Simulated: prophet is {ratio:.2f} × as fast as ep (")
    assert load in headline.sentence
    assert headline.tiles[0].value == f"{ratio:.2f} × ep"


def test_balanced_loads_need_no_strategy() -> None:
    sentence = simulation_headline(ranking("ep", "prophet", popular=4)).sentence
    assert sentence.startswith("Simulated: no simulated strategy is faster than ep, which takes ")


def test_a_job_that_does_not_fit_says_what_it_needs() -> None:
    report = ranking("ep", memory_bytes=100)
    headline = simulation_headline(report)
    assert "no strategy fits into the memory of a device. ep needs " in headline.sentence
    assert headline.tiles == ()
