import itertools
import json
import sys

import pytest

from benchmarks import predictor_accuracy as accuracy

NAMES = ("num_layers", "num_experts", "top_k", "hidden_size", "ffn_size", "tokens_per_rank")
SIZE = dict(zip(NAMES, (2, 8, 2, 16, 32, 64), strict=True))
PACE = {"expert_flops_per_s": 1e9, "attention_s": 1e-3}
PAYLOAD = 1e7


def record(out, samples):
    options = {"nodes": 2, "ranks_per_node": 2, "rate": "100mbit", "repetitions": 3, "warm_up": 1, "seed": 0}
    options = {key: str(value) for key, value in {**options, "out": out, "trace": False}.items()}
    measured = {"size": SIZE, "pace": PACE, "link_payload_bytes_per_s": PAYLOAD, "samples": samples}
    return {"options": options, **measured}


def sample(workload, variant, iteration, seconds):
    return {"workload": workload, "variant": variant, "iteration": iteration, "seconds": seconds}


def test_seconds_of_plain_expert_parallelism_equal_those_worked_out_by_hand(tmp_path):
    """Loads are balanced, links inside nodes and start-ups cost nothing, so seconds are a simple sum."""
    (comparison,) = accuracy.compare(record(tmp_path, [sample("W0", "none", 1, 1.0)]), None)
    pairs = SIZE["tokens_per_rank"] * SIZE["top_k"]
    experts_s = 3 * pairs * 4 * SIZE["hidden_size"] * SIZE["ffn_size"] / PACE["expert_flops_per_s"]
    # The two ranks of a node send half of their pairs to the other node four times, twice with probabilities.
    exchange_s = pairs * (4 * SIZE["hidden_size"] * 4 + 2 * 4) / PAYLOAD
    wanted_s = SIZE["num_layers"] * (experts_s + exchange_s + 3 * PACE["attention_s"])
    assert comparison.simulated_s == pytest.approx(wanted_s, rel=0.05)  # counts are gathered too
    assert comparison.error == pytest.approx(comparison.simulated_s - 1)


def test_the_command_writes_tables(tmp_path, monkeypatch, capsys):
    cells = itertools.product(("W0", "W1"), ("none", "fssdp"), (1, 2, 3))
    samples = [sample(*cell, 0.05) for cell in cells]
    noisy = {**record(tmp_path, samples), "control_difference": {"W0": 0.01, "W1": -0.25}}
    (tmp_path / "testbed.json").write_text(json.dumps(noisy))
    out = tmp_path / "report"
    monkeypatch.setattr(sys, "argv", ["predictor_accuracy", str(tmp_path), "--out", str(out)])
    assert accuracy.main() == 0
    assert json.loads((out / "predictor_accuracy.json").read_text())["summary"]["num_comparisons"] == 4
    printed = capsys.readouterr().out
    assert "| 100mbit | W1 | fssdp | 50.0 |" in printed
    assert "differed by up to 25.0%" in printed
