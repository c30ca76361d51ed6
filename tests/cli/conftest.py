import sys

import pytest

from megatron_fssdp.cli import app
from megatron_fssdp.launch.rank_command import RankCommand


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
