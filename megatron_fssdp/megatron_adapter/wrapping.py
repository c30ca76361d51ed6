"""Replaces functions of Megatron by functions that call them."""

from collections.abc import Callable
from functools import wraps
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function of a module, class or object by ``around``, whose first argument is the original."""
    setattr(owner, name, wrapped(around, getattr(owner, name)))


def wrapped(around: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``around`` with the original as first argument."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return call
