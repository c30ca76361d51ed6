import sys

import pytest

from megatron_fssdp import __version__
from megatron_fssdp.cli.shared_options import SHIPPED_NAMES, SYSTEM_NAMES
from megatron_fssdp.config.strategy.strategy_registry import SHIPPED, STRATEGIES
from megatron_fssdp.systems.system_list import SYSTEMS

from ..support.python_process import python_output, run_python


def test_help_and_version_need_no_heavy_imports():
    code = (
        "import sys; from megatron_fssdp.cli import app; sys.argv = ['megatron-fssdp', '--help']\n"
        "try: app.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'megatron', 'numpy', 'matplotlib', 'pydantic', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    assert "train" in python_output("-c", code)


def test_help_names_all_strategies():
    assert {name for name, entry in STRATEGIES.items() if entry.package == SHIPPED} == {
        *SHIPPED_NAMES.split(", ")
    }
    assert list(SYSTEMS) == SYSTEM_NAMES.split(", ")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["train", "models/mixtral-8x7"], ["models/mixtral-8x7b"]),
        (["train", "gpt_moe_tiny", "--moe-strategy", "fs"], ["fssdp"]),
        (["simulate", "--strategies", "ep,f"], ["ep,fssdp", "ep,fastermoe", "ep,flexmoe"]),
        (["simulate", "--strategies", "ep,u"], ["ep,ultraep-like"]),
        (["simulate", "--cluster", "hecate-"], ["hecate-a", "hecate-b"]),
        (["train", "my_own.y"], []),  # the shell completes files
    ],
)
def test_a_shell_completes_names(command, monkeypatch, words, wanted):
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # pytest is not the program's name
    monkeypatch.setenv("_MEGATRON_FSSDP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["megatron-fssdp", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert command()[1].split() == wanted


@pytest.mark.parametrize("flag", ["-h", "--help", "--version"])
def test_the_module_answers_questions_about_itself(flag):
    done = run_python("-m", "megatron_fssdp", flag)
    assert (done.returncode, done.stderr) == (0, "")
    wanted = __version__ if flag == "--version" else "-m megatron_fssdp SCRIPT.py"
    assert wanted in done.stdout
