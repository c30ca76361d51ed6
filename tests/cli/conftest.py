import subprocess
import sys
from contextlib import contextmanager

import pytest

from megatron_fssdp.cli import app
from megatron_fssdp.launch.rank_command import RankCommand


@pytest.fixture
def held():
    """Holds a folder in another process, as a run in progress does; gives this process's number."""

    @contextmanager
    def hold(folder):
        code = "import pathlib, sys, time; from megatron_fssdp.files import run_lock\n"
        code += "run_lock.hold(pathlib.Path(sys.argv[1]), ''); print('held', flush=True); time.sleep(1800)"
        words = [sys.executable, "-c", code, str(folder)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout.readline() == "held\n"
            yield holder.pid
            holder.kill()

    return hold


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `megatron-fssdp ARGS…` in this process: exit code, stdout, stderr.

    The check of Megatron's arguments, which changes torch in its process, is left out; test_check_command.py
    has it.
    """
    monkeypatch.setenv("MEGATRON_FSSDP_DEVICE", "cpu")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(RankCommand, "check", lambda *_, **__: None)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["megatron-fssdp", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            app.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run
