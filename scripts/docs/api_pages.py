"""Generate the API pages, one for each of the packages below; mkdocstrings fills them."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_fssdp"
ROOMS = {
    "strategies": "what each strategy decides, and when",
    "planning": "placements, loads, costs and all algorithms, as pure functions",
    "simulation": "the seconds, bytes and memory that decisions cost",
    "config": "settings and YAML",
    "testing": "functions that run on forked ranks",
}
"""Packages that have a page, because they can be used on their own, with a short description."""
if (PACKAGE / "records").is_dir():
    ROOMS["records"] = "the files of a run"


def pages() -> dict[str, str]:
    """Return the Markdown text of each page, by its path below docs/."""
    texts = {"reference/api/index.md": _index()}
    for room in ROOMS:
        parts = [f"# `{room}`: {ROOMS[room]}", *(f"::: {module}" for module in _modules(PACKAGE / room))]
        texts[f"reference/api/{room}.md"] = "\n\n".join(parts) + "\n"
    return texts


def _modules(room: Path) -> list[str]:
    """Dotted names of a package's public modules, including those of its subpackages."""
    files = (path for path in room.rglob("*.py") if _is_public(path))
    return sorted(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files)


def _is_public(path: Path) -> bool:
    return not path.name.startswith("_") and ast.get_docstring(ast.parse(path.read_text("utf-8"))) is not None


def _index() -> str:
    rooms = "\n".join(
        f"- [`{room}`]({room}.md): {words}" for room, words in ROOMS.items() if (PACKAGE / room).is_dir()
    )
    return f"""# API

These pages are made from the docstrings of the packages that can be used on their own.
[Architecture](../../architecture.md) describes which package may import which.

{rooms}

::: megatron_fssdp
"""
