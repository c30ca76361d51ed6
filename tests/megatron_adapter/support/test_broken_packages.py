"""An incomplete Transformer Engine is named by one line, wherever its import ends Megatron's.

Python processes of their own are needed, because this process has imported Megatron already.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_fssdp.megatron_adapter.support.broken_packages import BrokenPackage, broken_package

ROOT = Path(__file__).parents[3]
NO_EXTENSION = "raise RuntimeError('Found empty `transformer-engine` meta package installed.')"
NO_LIBRARY = "raise FileNotFoundError('Could not find shared object file for Transformer Engine core lib.')"


def install(folder: Path, package: str = "", pytorch: str = "") -> Path:
    """Write a Transformer Engine whose modules run the given code."""
    (folder / "transformer_engine" / "pytorch").mkdir(parents=True)
    (folder / "transformer_engine" / "__init__.py").write_text(package)
    (folder / "transformer_engine" / "pytorch" / "__init__.py").write_text(pytorch)
    return folder


def python(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    changed = {"PYTHONPATH": f"{folder}:{ROOT}", "MEGATRON_FSSDP_DEVICE": "cpu", "COLUMNS": "400"}
    environment = {**os.environ, **changed}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, cwd=folder, timeout=240
    )


@pytest.mark.slow
def test_the_doctor_names_transformer_engine_and_clears_megatron(tmp_path: Path) -> None:
    done = python(install(tmp_path, NO_EXTENSION), "-m", "megatron_fssdp", "doctor")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    problems = [line for line in done.stdout.splitlines() if line.startswith("problem: ")]
    assert len(problems) == 1
    assert problems[0].startswith("problem: Transformer Engine: wanted a complete installation or none")
    assert f"{tmp_path}/transformer_engine" in done.stdout
    assert "RuntimeError: Found empty" in done.stdout
    assert "cannot be imported because of Transformer Engine" in done.stdout


def test_the_launcher_gives_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('the script ran')")
    folder = install(tmp_path, NO_LIBRARY)
    done = python(folder, "-m", "megatron_fssdp", script, "--moe-strategy", "fssdp")
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]  # torch may warn before that
    assert line.startswith("[fssdp] error: Transformer Engine: got an incomplete installation")
    assert "FileNotFoundError: Could not find shared object file" in line
    assert "wanted a complete one or none: pip uninstall transformer-engine" in line


@pytest.mark.slow
@pytest.mark.parametrize("code", [NO_EXTENSION, NO_LIBRARY])
@pytest.mark.parametrize("part", ["package", "pytorch"])
@pytest.mark.parametrize("command", ["doctor", "train"])
def test_every_incomplete_part_is_named(code: str, part: str, command: str, tmp_path: Path) -> None:
    folder = install(tmp_path, **{"package": "__version__ = '2.5.0'", part: code})
    config = ROOT / "configs" / "gpt_moe_tiny.yaml"
    words = ["doctor"] if command == "doctor" else ["train", config, "--out", tmp_path / "run"]
    done = python(folder, "-c", "from megatron_fssdp.cli.app import main; main()", *words)
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    assert done.returncode == (1 if command == "doctor" else 2), output
    assert ("1 problem:" in output) == (command == "doctor")
    assert "Transformer Engine" in output


def test_a_left_over_folder_is_named() -> None:
    module = ModuleType("transformer_engine")
    with pytest.raises(AttributeError) as raised:
        print(module.__version__)
    found = broken_package(raised.value)
    assert found is not None
    assert found.name == "Transformer Engine"
    error = ImportError("No package metadata was found for transformer-engine", name="transformer-engine")
    assert broken_package(error) == BrokenPackage(
        "Transformer Engine",
        "transformer-engine",
        "ImportError: No package metadata was found for transformer-engine",
    )


def test_other_errors_are_nobodys() -> None:
    assert broken_package(ValueError("3")) is None
    assert broken_package(ModuleNotFoundError("No module named 'megatron'", name="megatron")) is None
