"""Replaces functions of Megatron by others, whose first argument is the original."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of a module, class or object by ``around``."""
    setattr(owner, name, wrapped(around, getattr(owner, name)))


def wrapped(around: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``around`` with the original as its first argument, under the original's name."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return call
