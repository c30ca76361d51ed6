from pathlib import Path

from megatron_fssdp.records.metrics_file import read_metrics

from ..support.python_process import run_python

OLD_RUN = Path(__file__).parents[1] / "records" / "old_run"


def test_a_recorded_run_is_shown_once(tmp_path: Path, command) -> None:
    done = run_python("-m", "megatron_fssdp.cli.app", "watch", OLD_RUN)
    assert done.returncode == 0, done.stderr
    last = read_metrics(OLD_RUN)[-1]
    assert f"iteration {last.iteration}" in " ".join(done.stdout.split())
    for layer in last.layers:
        assert any(line.split()[:1] == [str(layer.layer)] for line in done.stdout.splitlines())
    _, empty, _ = command("watch", tmp_path)
    assert "waiting for the first iteration" in " ".join(empty.split())
    code, _, error = command("watch", tmp_path / "none")
    assert code == 2
    assert "is no folder" in error
