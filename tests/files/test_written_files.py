import os
from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.files.written_files import refuse_unwritable, written_file, written_whole


def write_and_fail(target):
    with written_file(target, "--out") as partial:
        partial.write_text("two")
        raise RuntimeError


def write_both(folder):
    with written_whole(folder, "--out") as partial:
        (partial / "other.json").write_text("{}")
        (partial / "full").write_text("page")


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "new" / "page.html"
    with written_file(target, "--out") as partial:
        partial.write_text("one")
        assert not target.exists()
    assert target.read_text() == "one"
    with pytest.raises(RuntimeError):
        write_and_fail(target)
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]
    assert target.read_text() == "one"


def test_a_pipe_is_refused_before_the_work_and_stays(tmp_path):
    pipe = tmp_path / "full"
    os.mkfifo(pipe)
    with pytest.raises(ConfigurationError, match="is a device or a pipe, wanted a file"):
        write_and_fail(pipe)
    with pytest.raises(ConfigurationError, match="is a device or a pipe, wanted a file"):
        write_both(tmp_path)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["full"]
    with pytest.raises(ConfigurationError, match="--out /dev/null: is not a folder but a device or a pipe"):
        write_both(Path("/dev/null"))


def test_a_folder_without_permission_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    Path("locked").mkdir(mode=0o555)
    user = os.geteuid()
    if user == 0:  # root may write everywhere
        os.seteuid(65534)
    try:
        with pytest.raises(ConfigurationError, match=r"--out locked/x: got locked, .* .Permission denied"):
            refuse_unwritable("locked/x", "--out")
    finally:
        os.seteuid(user)
