"""``watch`` follows the records of a training."""

import subprocess
import sys
from pathlib import Path

from megatron_fssdp.records.metrics_file import read_metrics

OLD_RUN = Path(__file__).parents[1] / "records" / "old_run"


def watch(run: Path) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "megatron_fssdp.cli.app", "watch", str(run))
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_recorded_run_is_shown_once(tmp_path: Path) -> None:
    done = watch(OLD_RUN)
    assert done.returncode == 0, done.stderr
    last = read_metrics(OLD_RUN)[-1]
    assert f"iteration {last.iteration}" in " ".join(done.stdout.split())
    for layer in last.layers:
        assert any(line.split()[:1] == [str(layer.layer)] for line in done.stdout.splitlines())
    empty = watch(tmp_path)
    assert "waiting for the first iteration" in " ".join(empty.stdout.split())
    missing = watch(tmp_path / "none")
    assert missing.returncode == 2
    assert "is no folder" in missing.stderr
