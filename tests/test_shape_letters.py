"""Names, docstrings and the documentation use one letter for one axis: those of ``SHAPE_LETTERS``."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import megatron_fssdp
from megatron_fssdp.planning.shape_letters import SHAPE_LETTERS

ROOT = Path(megatron_fssdp.__file__).parent
# counts_DE, _owner_E, expert_LDW: lower-case words, then the letters. CHUNK_BYTES does not match.
SUFFIX = re.compile(r"^_*[a-z][a-z0-9]*(?:_[a-z0-9]+)*_([A-Z][A-Za-z]*)$")
# ``[D, E]``, ``[2F, M]``, ``[H+1]``, ``[T, ...]``: shapes whose axes are single letters.
SHAPE = re.compile(r"\[((?:\d?[A-Z](?:\+1)?)(?:, (?:\d?[A-Z](?:\+1)?|\d+|\.\.\.))*)\]")


def unknown_letters(source: str) -> Iterator[str]:
    """Names and shapes of a module with a letter that is not in the table."""
    for node in ast.walk(ast.parse(source)):
        names = [getattr(node, field, None) for field in ("id", "arg", "attr", "name")]
        letters = {
            name: match[1] for name in names if isinstance(name, str) and (match := SUFFIX.match(name))
        }
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            shapes = SHAPE.findall(ast.get_docstring(node) or "")
            letters |= {shape: "".join(re.findall("[A-Z]", shape)) for shape in shapes}
        yield from (name for name, used in letters.items() if not set(used) <= set(SHAPE_LETTERS))


def test_one_letter_stands_for_one_axis() -> None:
    assert list(unknown_letters("counts_Da[0] = MOST_MIB")) == ["counts_Da"]
    found = {path: list(unknown_letters(path.read_text(encoding="utf-8"))) for path in ROOT.rglob("*.py")}
    assert not {path: names for path, names in found.items() if names}
    sections = [
        page.read_text("utf-8").partition("## Shape letters")[2] for page in ROOT.parent.glob("docs/*.md")
    ]
    rows = [
        dict(re.findall(r"^\| `([A-Z])` \| ([^|]+?) \|", text, re.MULTILINE)) for text in sections if text
    ]
    assert rows == [SHAPE_LETTERS]
