"""The benchmark of overlapped shared experts runs from start to end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_it_prints_the_seconds_of_each_strategy() -> None:
    options = (
        "--loopback --nodes 2 --tokens 16 --half-ms 1 --experts-ms 1 --repetitions 2 --strategies ep,none"
    )
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.shared_expert_overlap", *options.split()],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert not done.returncode, done.stderr[-3000:]
    results = [line for line in done.stdout.splitlines() if " saved " in line]
    assert [line.split(":")[0] for line in results] == ["ep", "none"]
