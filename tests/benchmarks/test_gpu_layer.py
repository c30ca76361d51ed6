"""The benchmark of one layer runs on CPU tensors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_benchmark_runs_at_toy_size_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "layer.json"
    words = [sys.executable, "benchmarks/gpu_layer.py", "--cpu", "--size", "toy", "--repetitions", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())["sizes"]["toy"]
    assert record["relative_difference"] < 1e-5
    assert set(record["seconds"]) == {"ours", "SequentialMLP"}
    for quartiles in (
        *record["seconds"].values(),
        record["megatron_over_ours"]["SequentialMLP"],
        record["host_overhead_s"],
    ):
        assert 0 < quartiles[0] <= quartiles[1] <= quartiles[2]
    assert record["host_overhead_s"][1] < record["seconds"]["ours"][2], "a part of the layer"
    assert "SequentialMLP / ours" in done.stdout
