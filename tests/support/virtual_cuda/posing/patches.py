"""Replaces attributes of modules and classes, and restores them."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

_MISSING = object()


class Patches:
    """Replaced attributes, to be used as a context manager that restores them in reverse order."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def put(self, owner: Any, values: Mapping[str, Any]) -> None:
        """Replace attributes of a module or a class by these values, by name."""
        for name, value in values.items():
            before = vars(owner).get(name, _MISSING)
            setattr(owner, name, value)
            self._undo.callback(_restore, owner, name, before)

    def __enter__(self) -> "Patches":
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def _restore(owner: Any, name: str, before: Any) -> None:
    if before is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
