"""The doctor's verdicts on checkpoint folders."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fssdp.megatron_adapter.diagnosis import checkpoint_folder
from megatron_fssdp.megatron_adapter.diagnosis.checkpoint_folder import (
    FolderState,
    check_folder,
    look_at_folder,
)
from tests.megatron_adapter.diagnosis.machine_examples import NOTE, OK, PROBLEM


def test_a_folder_is_checked_by_writing_and_left_unchanged(tmp_path: Path) -> None:
    state = look_at_folder(tmp_path)
    assert (state.exists, state.error) == (True, "")
    assert state.free_bytes is not None
    assert list(tmp_path.iterdir()) == []

    missing = look_at_folder(tmp_path / "a" / "b")
    assert (missing.exists, missing.error) == (False, "")
    assert list(tmp_path.iterdir()) == []
    assert "can be created" in check_folder(missing, "--checkpoints").found


def test_a_path_that_is_not_a_folder_cannot_hold_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "dangling"):
        state = look_at_folder(path)
        assert "is not a folder" in state.error
        assert check_folder(state, "--checkpoints").verdict is PROBLEM


@pytest.mark.parametrize(
    ("number", "is_full", "words"),
    [
        (errno.EACCES, False, "may write to"),
        (errno.EROFS, False, "may write to"),
        (errno.ENOSPC, True, "make room"),
        (errno.EDQUOT, True, "raise the quota"),
    ],
)
def test_an_unwritable_folder_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_full: bool, words: str
) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(number, "the system's words")

    monkeypatch.setattr(checkpoint_folder, "_write_and_forget", refuse)
    state = look_at_folder(tmp_path)
    assert (state.error, state.is_full) == ("the system's words", is_full)
    finding = check_folder(state, "--checkpoints")
    assert finding.verdict is PROBLEM
    assert words in finding.advice
    assert "with --checkpoints" in finding.advice


def test_little_free_space_is_a_note() -> None:
    little = FolderState(Path("/c"), free_bytes=1 << 29)
    assert check_folder(little, "--checkpoints").verdict is NOTE
    assert check_folder(replace(little, free_bytes=1 << 31), "--checkpoints").verdict is OK
