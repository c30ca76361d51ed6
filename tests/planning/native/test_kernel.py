"""Which form of the kernels runs: the compiled one only if it was made from the present sources."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.planning.kernels import even_split
from megatron_fssdp.planning.native import kernel as kernel_module
from megatron_fssdp.planning.native import kernel_files as kernel_files_module
from megatron_fssdp.planning.native.kernel import Kernel, KernelForm, kernel_form, use_plain_kernels
from megatron_fssdp.planning.native.kernel_files import KERNELS, kernel_files, source_for_cython

ROOT = Path(__file__).parents[3]

SOURCE = """from megatron_fssdp.planning.native import compiler_marks as cython
from megatron_fssdp.planning.native.kernel_types import Int, ReadInts

@cython.cfunc
def _plus(number: Int) -> Int:
    return number + {plus}

def total(values: ReadInts) -> Int:
    found: Int = 0
    for i in range(values.shape[0]):
        found += values[i]
    return _plus(found)
"""


@pytest.fixture
def undecided(monkeypatch):
    """Decides afresh in the test, and again after it."""
    kernel_module.set_form(None)
    yield monkeypatch
    monkeypatch.undo()
    kernel_module.set_form(None)


def pretend_files(monkeypatch, tmp_path, compiled):
    """Take the kernels' sources from a copy, with compiled files for some of them."""
    sources = tmp_path / "kernels"
    shutil.copytree(KERNELS, sources, ignore=shutil.ignore_patterns("compiled", "__pycache__"))
    (tmp_path / "compiled").mkdir(exist_ok=True)
    for file in kernel_files(sources, tmp_path / "compiled"):
        if file.source.stem in compiled:
            file.compiled.touch()
    monkeypatch.setattr(kernel_module, "kernel_files", lambda: kernel_files(sources, tmp_path / "compiled"))
    return sources


def test_nothing_compiled(undecided, tmp_path):
    pretend_files(undecided, tmp_path, ())
    assert kernel_form() == KernelForm(False, "not compiled")


def test_an_edited_source_is_never_served_by_what_was_compiled_before(undecided, tmp_path):
    names = [file.source.stem for file in kernel_files()]
    sources = pretend_files(undecided, tmp_path, names)
    with (sources / f"{names[0]}.py").open("a") as file:
        file.write("# changed\n")
    assert not kernel_form().is_compiled
    assert "other sources" in kernel_form().reason or names[0] in kernel_form().reason


def test_another_way_of_compiling_gives_all_kernels_other_names(monkeypatch):
    before = {file.module for file in kernel_files()}
    monkeypatch.setattr(kernel_files_module, "_INNER_MARKS", r"\1@cython.cfunc")
    assert not before & {file.module for file in kernel_files()}


def test_a_compiled_file_that_cannot_be_loaded_leaves_plain_python(undecided, tmp_path):
    pretend_files(undecided, tmp_path, [file.source.stem for file in kernel_files()])
    undecided.setattr(kernel_module, "_modules", {})
    assert "cannot be loaded" in kernel_form().reason


def test_all_kernels_turn_to_plain_python_together(undecided):
    even_row = Kernel(even_split.even_row)
    use_plain_kernels("another rank has no compiled kernels")
    tokens_P = np.zeros(2, np.int64)
    even_row(np.array([3]), np.zeros(2, np.int64), np.array([2]), np.arange(2), tokens_P)
    assert tokens_P.tolist() == [2, 1]
    assert even_row._run == even_row._run_plain
    assert str(kernel_form()) == "plain Python (another rank has no compiled kernels)"


def test_plain_kernels_refuse_what_compiled_ones_refuse():
    even_row = Kernel(even_split.even_row)
    even_row.select_form(is_compiled=False)
    wanted, strided, small = np.zeros(2, np.int64), np.zeros(4, np.int64)[::2], np.zeros(2, np.int32)
    for wrong in (strided, small):
        with pytest.raises(ValueError, match="int64, float64 or uint8 in C order"):
            even_row(*[wanted] * 4, wrong)


@pytest.mark.parametrize("file", kernel_files(), ids=lambda file: file.source.stem)
def test_every_kernel_has_the_imports_that_the_build_replaces(file):
    text = source_for_cython(file)
    assert "megatron_fssdp.planning.native import compiler_marks" not in text
    compile(text, str(file.source), "exec")


@pytest.mark.slow
def test_editing_and_compiling(tmp_path):
    """A checkout with one kernel: compiled, used, edited, not used, compiled again, used again."""
    pytest.importorskip("Cython")
    if shutil.which(sysconfig.get_config_var("CC").split()[0]) is None:
        pytest.skip("no C compiler")
    package = tmp_path / "megatron_fssdp" / "planning"
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copytree(ROOT / "megatron_fssdp" / "planning" / "native", package / "native")
    for folder in (package.parent, package, package / "kernels"):
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    source = package / "kernels" / "small.py"

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": "."},
            text=True,
            capture_output=True,
        )
        return done.stdout.strip(), done.returncode, done.stderr

    use = (
        "import numpy as np; from megatron_fssdp.planning.kernels import small;"
        "from megatron_fssdp.planning.native.kernel import Kernel, kernel_form;"
        "print(Kernel(small.total)(np.arange(4)), kernel_form())"
    )
    source.write_text(SOURCE.format(plus=1))
    assert run("-c", use)[0] == "7 plain Python (not compiled)"
    printed, code, errors = run("scripts/compile_kernels.py")
    assert code == 0, errors
    assert run("-c", use)[0] == "7 compiled"
    source.write_text(SOURCE.format(plus=2))
    assert run("-c", use)[0] == "8 plain Python (compiled from other sources)"
    run("scripts/compile_kernels.py", "--quiet")
    assert run("-c", use)[0] == "8 compiled"
    assert len(list((package / "kernels" / "compiled").iterdir())) == 1
    source.write_text("import torch\n")
    printed, code, _ = run("scripts/compile_kernels.py")
    assert code == 1
    assert "run as plain Python" in printed


def test_parts_and_constants_are_written_into_the_source(tmp_path):
    """Each part comes once, in place of its first import, and an edited part changes the compiled name."""
    (tmp_path / "parts").mkdir()
    header = SOURCE.split("\n\n")[0]
    part = tmp_path / "parts" / "base.py"
    part.write_text(
        f"{header}\n\n_STEP = 3  # steps\n\n@cython.inner\ndef f(x: Int) -> Int:\n    return x + _STEP\n"
    )
    kernel = tmp_path / "whole.py"
    lines = "from megatron_fssdp.planning.kernels.parts.base import _STEP, f\n" * 2
    kernel.write_text(f"{lines}{header}\n")
    (before,) = kernel_files(tmp_path, tmp_path)
    text = source_for_cython(before)
    assert text.count("def f") == 1
    assert "return x + 3" in text
    assert "@cython.cfunc\n@cython.nogil\n@cython.exceptval(check=False)\ndef f" in text
    assert "megatron_fssdp.planning.kernels" not in text
    part.write_text(part.read_text().replace("3", "4"))
    (after,) = kernel_files(tmp_path, tmp_path)
    assert after.module != before.module
