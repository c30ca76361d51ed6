"""Locks of run folders that other processes need; ``tests/cli/test_resumed_run.py`` meets a live run."""

from megatron_fssdp.files import run_lock


def test_ranks_do_not_lock_the_folder_that_train_holds_for_them(tmp_path, monkeypatch):
    monkeypatch.setenv(run_lock.HELD_VARIABLE, str(tmp_path.resolve()))
    assert run_lock.hold(tmp_path, "record_dir") == -1
    assert run_lock.hold(tmp_path / "other", "record_dir") >= 0
    run_lock.release(tmp_path / "other")


def test_looking_at_a_folder_changes_nothing(tmp_path):
    run_lock.refuse_live(tmp_path / "none", "--out")
    run_lock.refuse_live(tmp_path, "--out")
    assert list(tmp_path.iterdir()) == []
