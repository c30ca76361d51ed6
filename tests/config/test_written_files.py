"""Files appear whole, and nothing but a regular file is replaced."""

import os
from pathlib import Path

import pytest

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.written_files import written_file, written_whole


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "new" / "page.html"
    with written_file(target, "--out") as partial:
        partial.write_text("one")
        assert not target.exists()
    assert target.read_text() == "one"
    with pytest.raises(RuntimeError), written_file(target, "--out") as partial:
        partial.write_text("two")
        raise RuntimeError
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]
    assert target.read_text() == "one"


def test_a_pipe_is_refused_before_the_work_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "full"
    os.mkfifo(pipe)
    with pytest.raises(ConfigurationError, match="is a device or a pipe, wanted a file"):
        with written_file(pipe, "--out"):
            pytest.fail("the block must not begin")
    with pytest.raises(ConfigurationError, match="is a device or a pipe, wanted a file"):
        with written_whole(tmp_path, "--out") as partial:
            (partial / "other.json").write_text("{}")
            (partial / pipe.name).write_text("page")
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["full"]


def test_a_file_in_the_place_of_the_folder_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--out /dev/null: is not a folder; give the path of a"):
        with written_whole("/dev/null", "--out"):
            pytest.fail("the block must not begin")
