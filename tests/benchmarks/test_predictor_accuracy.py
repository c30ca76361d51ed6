"""Simulated and measured seconds are compared, on made-up results."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import predictor_accuracy as accuracy

NAMES = ("num_layers", "num_experts", "top_k", "hidden_size", "ffn_size", "tokens_per_rank")
SIZE = dict(zip(NAMES, (2, 8, 2, 16, 32, 64), strict=True))
PACE = {"expert_flops_per_s": 1e9, "attention_s": 1e-3}
PAYLOAD = 1e7


def record(out: Path, samples: list[dict[str, Any]]) -> dict[str, Any]:
    options = {"nodes": 2, "ranks_per_node": 2, "rate": "100mbit", "repetitions": 3, "warm_up": 1, "seed": 0}
    return {
        "options": {key: str(value) for key, value in {**options, "out": out, "trace": False}.items()},
        "size": SIZE,
        "pace": PACE,
        "link_payload_bytes_per_s": PAYLOAD,
        "samples": samples,
    }


def sample(workload: str, variant: str, iteration: int, seconds: float) -> dict[str, Any]:
    return {"workload": workload, "variant": variant, "iteration": iteration, "seconds": seconds}


def test_seconds_of_plain_expert_parallelism_equal_those_worked_out_by_hand(tmp_path: Path) -> None:
    """Loads are balanced, links inside nodes and start-ups cost nothing, so seconds are a simple sum."""
    found = accuracy.compare(record(tmp_path, [sample("W0", "none", 1, 1.0)]), None)
    (one,) = found
    pairs = SIZE["tokens_per_rank"] * SIZE["top_k"]
    experts_s = 3 * pairs * 4 * SIZE["hidden_size"] * SIZE["ffn_size"] / PACE["expert_flops_per_s"]
    # The two ranks of a node send half of their pairs to the other node four times, twice with probabilities.
    exchange_s = pairs * (4 * SIZE["hidden_size"] * 4 + 2 * 4) / PAYLOAD
    wanted_s = SIZE["num_layers"] * (experts_s + exchange_s + 3 * PACE["attention_s"])
    assert one.simulated_s == pytest.approx(wanted_s, rel=0.05)  # counts are gathered too
    assert one.error == pytest.approx(one.simulated_s - 1)


def test_a_measured_cluster_adds_its_start_up_times(tmp_path: Path) -> None:
    results = record(tmp_path, [sample("W1", "fssdp:slots=2", 1, 1.0)])
    (free,) = accuracy.compare(results, None)
    slow = accuracy.described_cluster(results, 2, 2, None).model_copy(
        update={"inter_node": accuracy.LinkDescription(alpha_s=1.0, bandwidth_bytes_per_s=1.0)}
    )
    (measured,) = accuracy.compare(results, slow)
    assert measured.simulated_s > free.simulated_s + 4 * SIZE["num_layers"] * 1.0
    assert measured.simulated_s < 1000, "the testbed's rate is kept"


def test_the_same_iterations_are_compared_and_control_runs_are_left_out(tmp_path: Path) -> None:
    samples = [
        sample("W6", name, number, 0.1 * number) for name in ("ep", "none again") for number in (1, 2, 3)
    ]
    (one,) = accuracy.compare(record(tmp_path, samples), None)
    assert (one.strategy, one.measured_s) == ("ep", pytest.approx(0.2))
    assert one.measured_spread == pytest.approx(0.5)


def test_figures_follow_their_definitions() -> None:
    measured, simulated = np.array([1.0, 2.0, 4.0]), np.array([1.1, 1.9, 4.0])
    comparisons = [
        accuracy.Comparison("100mbit", f"W{n}", "ep", m, 0.1, s)
        for n, (m, s) in enumerate(zip(measured, simulated, strict=True))
    ]
    figures = accuracy.summary(comparisons)
    assert figures["r_squared"] == pytest.approx(1 - 0.02 / ((measured - measured.mean()) ** 2).sum())
    assert figures["mean_relative_error"] == pytest.approx((0.1 + 0.05 + 0) / 3)
    assert figures["mean_signed_error"] == pytest.approx((0.1 - 0.05 + 0) / 3)
    assert figures["worst_relative_error"] == pytest.approx(0.1)
    assert figures["by"]["workload"]["W2"]["r_squared"] is None
    assert figures["by"]["strategy"]["ep"]["num_comparisons"] == 3


def test_the_command_writes_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [
        sample(workload, name, number, 0.05)
        for workload in ("W0", "W1")
        for name in ("none", "fssdp")
        for number in (1, 2, 3)
    ]
    noisy = {**record(tmp_path, samples), "control_difference": {"W0": 0.01, "W1": -0.25}}
    (tmp_path / "testbed.json").write_text(json.dumps(noisy))
    out = tmp_path / "report"
    monkeypatch.setattr(sys, "argv", ["predictor_accuracy", str(tmp_path), "--out", str(out)])
    assert accuracy.main() == 0
    assert json.loads((out / "predictor_accuracy.json").read_text())["summary"]["num_comparisons"] == 4
    printed = capsys.readouterr().out
    assert "| 100mbit | W1 | fssdp | 50.0 |" in printed
    assert "differed by up to 25.0%" in printed


@pytest.mark.parametrize(
    ("text", "wanted"), [("{}", "has no link_payload"), ("no", "cannot be read"), ("3", "cannot be read")]
)
def test_files_of_another_kind_are_refused(tmp_path: Path, text: str, wanted: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(accuracy.ConfigurationError, match=wanted):
        accuracy.read(path)
