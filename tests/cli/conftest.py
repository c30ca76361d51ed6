import sys

import pytest

from megatron_fssdp.cli import app


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `megatron-fssdp ARGS…` in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("MEGATRON_FSSDP_DEVICE", "cpu")
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["megatron-fssdp", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            app.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run
