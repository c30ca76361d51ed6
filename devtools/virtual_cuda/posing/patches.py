"""Replaces attributes of modules and classes, and restores them."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

_MISSING = object()


class Patches(ExitStack):
    """Replaced attributes, to be used as a context manager that restores them in reverse order."""

    def put(self, owner: Any, values: Mapping[str, Any]) -> None:
        """Replace attributes of a module or a class by these values, by name."""
        for name, value in values.items():
            before = vars(owner).get(name, _MISSING)
            setattr(owner, name, value)
            self.callback(*((delattr, owner, name) if before is _MISSING else (setattr, owner, name, before)))
