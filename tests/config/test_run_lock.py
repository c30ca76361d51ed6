"""A live run holds its folder against other processes, and a killed one does not."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fssdp.config import run_lock
from megatron_fssdp.config.errors import ConfigurationError

HOLD = "import pathlib, time; from megatron_fssdp.config import run_lock\n"
HOLD += "run_lock.hold(pathlib.Path({folder!r}), '--out'); print('held', flush=True); time.sleep(120)"


def test_a_live_run_is_named_and_a_killed_one_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(folder=str(folder))], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    for refused in (run_lock.hold, run_lock.refuse_live):
        with pytest.raises(ConfigurationError, match=rf"process {other.pid} on "):
            refused(folder, "--out")
    other.kill()
    other.wait()
    run_lock.refuse_live(folder, "--out")
    assert run_lock.hold(folder, "--out") >= 0
    run_lock.refuse_live(folder, "--out")  # its own
    run_lock.release(folder)


def test_ranks_do_not_lock_the_folder_that_train_holds_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(run_lock.HELD_VARIABLE, str(tmp_path.resolve()))
    assert run_lock.hold(tmp_path, "record_dir") == -1
    assert run_lock.hold(tmp_path / "other", "record_dir") >= 0
    run_lock.release(tmp_path / "other")


def test_looking_at_a_folder_changes_nothing(tmp_path: Path) -> None:
    run_lock.refuse_live(tmp_path / "none", "--out")
    run_lock.refuse_live(tmp_path, "--out")
    assert list(tmp_path.iterdir()) == []
