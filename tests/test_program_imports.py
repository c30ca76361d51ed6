"""Benchmarks, scripts, examples and pictures' programs import only what exists; few tests run them."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("megatron_fssdp", "benchmarks", "tests")
PROGRAMS = sorted(
    path for folder in ("benchmarks", "scripts", "examples", "docs") for path in (ROOT / folder).rglob("*.py")
)


def source_of(module: str) -> Path | None:
    """The file of a module, or the folder of a package that has no ``__init__.py``."""
    path = ROOT.joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py", path)
    return next((one for one in found if one.exists()), None)


@cache
def names_in(file: Path) -> frozenset[str]:
    """Everything that a module's file defines or imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return frozenset(names)


def missing_names(text: str) -> list[str]:
    """The absolute imports from this repository in a program's text whose names do not exist."""
    missing = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        if node.module.partition(".")[0] not in PACKAGES:
            continue
        source = source_of(node.module)
        for alias in node.names:
            is_there = source is not None and source.is_file() and alias.name in names_in(source)
            if not is_there and source_of(f"{node.module}.{alias.name}") is None:
                missing.append(f"line {node.lineno}: {node.module}.{alias.name}")
    return missing


def test_programs_import_only_what_exists():
    missing = {program: missing_names(program.read_text(encoding="utf-8")) for program in PROGRAMS}
    assert not {program: names for program, names in missing.items() if names}


def test_a_missing_name_or_module_is_found():
    text = "from megatron_fssdp.config.errors import {}\nfrom megatron_fssdp.{} import x"
    assert missing_names(text.format("ConfigurationError", "nowhere")) == ["line 2: megatron_fssdp.nowhere.x"]
    assert missing_names(text.format("Absent", "nowhere"))[0] == "line 1: megatron_fssdp.config.errors.Absent"
