import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.python_process import ROOT

EXAMPLES = ROOT / "examples"


def run(words, folder, **variables):
    """Run a command in an empty folder with the tools of this Python, and return its standard output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cpu = {"PATH": path, "PYTHONPATH": str(ROOT), "MEGATRON_FSSDP_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **cpu, **variables}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_the_python_api_has_a_help_without_ranks(tmp_path):
    assert "torchrun" in run([sys.executable, str(EXAMPLES / "python_api" / "train.py"), "--help"], tmp_path)


@pytest.mark.slow
def test_the_python_api_trains_without_the_launcher(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = run([*torchrun, str(EXAMPLES / "python_api" / "train.py")], tmp_path)
    losses = [float(line.split()[3].rstrip(",")) for line in out.splitlines() if line.startswith("iteration")]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
def test_own_data_becomes_a_run_with_a_page(tmp_path):
    run(["bash", str(EXAMPLES / "own_data" / "run.sh")], tmp_path, ITERS="3")
    assert (tmp_path / "runs" / "own_data" / "run" / "report.html").is_file()
