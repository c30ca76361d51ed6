"""Names, docstrings and legends use one letter for one axis: those of ``SHAPE_LETTERS``."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_fssdp
from megatron_fssdp.planning.shape_letters import SHAPE_LETTERS

ROOT = Path(megatron_fssdp.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
# counts_DE, _owner_E, expert_LDW: lower-case words, then the letters. CHUNK_BYTES does not match.
SUFFIX = re.compile(r"^_*[a-z][a-z0-9]*(?:_[a-z0-9]+)*_([A-Z][A-Za-z]*)$")
LEGEND = re.compile(r"Shape letters: (.*?)\.(?=\n|$)", re.DOTALL)
LEGEND_ITEM = re.compile(r"(\w) (.+?)(?:, (?=[A-Z] )|$)")
# ``[D, E]``, ``[2F, M]``, ``[H+1]``, ``[T, ...]``: shapes whose axes are single letters.
SHAPE = re.compile(r"\[((?:\d?[A-Z](?:\+1)?)(?:, (?:\d?[A-Z](?:\+1)?|\d+|\.\.\.))*)\]")


def names_of(tree: ast.AST) -> Iterator[str]:
    """Every name that a module defines or uses: variables, arguments, attributes, functions and keywords."""
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name


def docstrings_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def problems(source: str) -> list[str]:
    """What in a module does not agree with the package's letters."""
    tree = ast.parse(source)
    found = [
        f"{name}: {letter} is not in SHAPE_LETTERS"
        for name in sorted(set(names_of(tree)))
        if (match := SUFFIX.match(name))
        for letter in match[1]
        if letter not in SHAPE_LETTERS
    ]
    for text in docstrings_of(tree):
        found += [
            f"[{shape}]: {letter} is not in SHAPE_LETTERS"
            for shape in SHAPE.findall(text)
            for letter in re.findall("[A-Z]", shape)
            if letter not in SHAPE_LETTERS
        ]
        for legend in LEGEND.findall(text):
            for letter, axis in LEGEND_ITEM.findall(" ".join(legend.split())):
                # A legend may add words: "T tokens of this rank" agrees with "T tokens".
                if not f"{axis} ".startswith(f"{SHAPE_LETTERS.get(letter)} "):
                    found.append(f"legend: {letter} is '{axis}', wanted '{SHAPE_LETTERS.get(letter)}'")
        if "Shape legend" in text:
            found.append("legend: begins with 'Shape legend', wanted 'Shape letters'")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_use_the_packages_letters(path: Path) -> None:
    if path.name != "shape_letters.py":
        assert problems(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("counts_Da = 0", "counts_Da: a is not in SHAPE_LETTERS"),
        ("def load(tokens_Dm): ...", "tokens_Dm: m is not in SHAPE_LETTERS"),
        ('"""A module.\n\nShape letters: D nodes, E experts.\n"""', "legend: D is 'nodes', wanted 'devices'"),
        ('"""Shape legend: E experts."""', "legend: begins with 'Shape legend', wanted 'Shape letters'"),
    ],
)
def test_other_letters_are_found(source: str, problem: str) -> None:
    assert problems(source) == [problem]


def test_constants_are_no_shapes() -> None:
    assert problems("CHUNK_BYTES = MOST_MIB = 1") == []
