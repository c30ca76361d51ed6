"""Pages of the API, one for each room of docs/architecture.md; mkdocstrings fills them."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_fssdp"
ROOMS = {
    "strategies": "what is decided when",
    "planning": "placements, loads, costs and every algorithm: pure functions",
    "simulation": "decisions executed in seconds",
    "config": "settings, YAML and JSON Schema",
    "testing": "functions on forked ranks",
}
"""Rooms with pages: those that can be used by themselves."""


def pages() -> dict[str, str]:
    """Markdown by path below docs/."""
    found = {"reference/api/index.md": _index()}
    for room in ROOMS:
        parts = [f"# `{room}`: {ROOMS[room]}", *(f"::: {module}" for module in _modules(PACKAGE / room))]
        found[f"reference/api/{room}.md"] = "\n\n".join(parts) + "\n"
    return found


def _modules(room: Path) -> list[str]:
    """Dotted names of a room's public modules, those of its sub-rooms included."""
    files = (path for path in room.rglob("*.py") if _is_public(path))
    return sorted(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files)


def _is_public(path: Path) -> bool:
    return not path.name.startswith("_") and ast.get_docstring(ast.parse(path.read_text("utf-8"))) is not None


def _index() -> str:
    rooms = "\n".join(f"- [`{room}`]({room}.md): {words}" for room, words in ROOMS.items())
    return f"""# API

From the docstrings, read without importing anything. Who may import whom:
[architecture](../../architecture.md).

{rooms}

::: megatron_fssdp
"""
