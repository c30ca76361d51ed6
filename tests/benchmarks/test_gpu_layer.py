"""The benchmark of layers on one card runs on CPU ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_variants_compute_the_same_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "layer.json"
    words = ["benchmarks/gpu_layer.py", "--device", "cpu", "--sizes", "toy", "--repetitions", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"cwd": ROOT, "env": environment, "text": True, "timeout": 600}
    done = subprocess.run([sys.executable, *words, "--out", str(out)], capture_output=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())["sizes"]["toy"]
    assert record["relative_difference"] < 1e-5
    assert record["layer"]["fssdp"]["replicas"] > 0
    for one in record["layer"].values():
        assert 0 < one["busiest_s"][0] <= one["busiest_s"][1] <= one["busiest_s"][2]
    assert "fssdp: kernels of the busiest rank" in done.stdout
