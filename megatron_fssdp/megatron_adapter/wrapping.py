"""Replaces functions of Megatron by functions that call them."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of a module, class or object by ``around``, whose first argument is the original."""
    original = getattr(owner, name)

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)
