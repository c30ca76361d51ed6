"""Python processes of their own are needed, because this process has imported Megatron already."""

from pathlib import Path
from types import ModuleType

import pytest

from megatron_fssdp.megatron_adapter.support.capabilities import broken_package

from ...support.python_process import ROOT, run_python

CODES = (
    "raise RuntimeError('Found empty `transformer-engine` meta package installed.')",
    "raise FileNotFoundError('Could not find shared object file for Transformer Engine core lib.')",
)
MAIN = ("-c", "from megatron_fssdp.cli.app import main; main()")
COMMANDS = {
    "doctor": (*MAIN, "doctor"),
    "train": (*MAIN, "train", "{ROOT}/configs/gpt_moe_tiny.yaml"),
    "launcher": ("-m", "megatron_fssdp", "script.py", "--moe-strategy", "fssdp"),
}


@pytest.mark.parametrize(
    ("command", "code", "part"),
    [
        ("launcher", 1, "package"),
        pytest.param("launcher", 0, "pytorch", marks=pytest.mark.slow),
        pytest.param("doctor", 0, "package", marks=pytest.mark.slow),
        pytest.param("train", 1, "pytorch", marks=pytest.mark.slow),
    ],
)
def test_every_incomplete_part_is_named_by_one_line(
    command: str, code: int, part: str, tmp_path: Path
) -> None:
    texts = {"package": "__version__ = '2.5.0'", "pytorch": "", part: CODES[code]}
    folder = tmp_path / "transformer_engine"
    (folder / "pytorch").mkdir(parents=True)
    (folder / "__init__.py").write_text(texts["package"])
    (folder / "pytorch" / "__init__.py").write_text(texts["pytorch"])
    (tmp_path / "script.py").write_text("print('the script ran')")
    changed = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "MEGATRON_FSSDP_DEVICE": "cpu", "COLUMNS": "400"}
    done = run_python(*(word.format(ROOT=ROOT) for word in COMMANDS[command]), cwd=tmp_path, **changed)
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    assert "Transformer Engine" in output
    if command == "doctor":
        assert done.returncode == 1, output
        problems = [line for line in done.stdout.splitlines() if line.startswith("problem: ")]
        assert len(problems) == 1
        assert problems[0].startswith("problem: Transformer Engine: wanted a complete")
        return
    assert done.returncode == 2, output
    assert done.stdout == ""
    line = done.stderr.splitlines()[-1]  # torch may warn before that
    assert "Transformer Engine: got an incomplete installation" in line
    assert "wanted a complete one or none: pip uninstall transformer-engine" in line


def test_a_left_over_folder_is_named_and_other_errors_are_nobodys() -> None:
    module = ModuleType("transformer_engine")
    with pytest.raises(AttributeError) as raised:
        print(module.__version__)
    for error, wanted in (
        (raised.value, "Transformer Engine"),
        (ImportError("No package metadata", name="transformer-engine"), "Transformer Engine"),
        (ValueError("3"), None),
        (ModuleNotFoundError("No module named 'megatron'", name="megatron"), None),
    ):
        assert broken_package(error) == wanted
