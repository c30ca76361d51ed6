from pathlib import Path

from megatron_fssdp.records.metrics_file import read_metrics

from ..support.python_process import run_python

OLD_RUN = Path(__file__).parents[1] / "records" / "old_run"


def test_a_recorded_run_is_shown_once(tmp_path: Path) -> None:
    watch = ("-m", "megatron_fssdp.cli.app", "watch")
    done = run_python(*watch, OLD_RUN)
    assert done.returncode == 0, done.stderr
    last = read_metrics(OLD_RUN)[-1]
    assert f"iteration {last.iteration}" in " ".join(done.stdout.split())
    for layer in last.layers:
        assert any(line.split()[:1] == [str(layer.layer)] for line in done.stdout.splitlines())
    empty = run_python(*watch, tmp_path)
    assert "waiting for the first iteration" in " ".join(empty.stdout.split())
    missing = run_python(*watch, tmp_path / "none")
    assert missing.returncode == 2
    assert "is no folder" in missing.stderr
