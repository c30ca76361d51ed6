"""Marks in the source of a kernel that only the compiler reads.

A kernel (:mod:`megatron_fssdp.planning.kernels`) imports this module under the name ``cython``. As plain
Python the marks do nothing, so Cython need not be installed where kernels run. When a kernel is compiled,
``scripts/compile_kernels.py`` replaces that import by ``import cython``. The module has only the marks that
kernels use.
"""

from collections.abc import Callable
from typing import Any

type void = None
"""Result of a C function that returns nothing."""


def cclass[C](kind: type[C]) -> type[C]:
    """Make a class whose annotated attributes are C variables."""
    return kind


def cfunc[F: Callable[..., Any]](function: F) -> F:
    """Make a C function, which only the same kernel can call."""
    return function


def inner[F: Callable[..., Any]](function: F) -> F:
    """Stand for ``final``, ``cfunc``, ``nogil`` and ``exceptval(check=False)`` together."""
    return function


def exceptval[F: Callable[..., Any]](*, check: bool) -> Callable[[F], F]:
    """Declare whether callers of a C function have to look for an exception.

    Args:
        check: False for a function that raises nothing.
    """

    def unchanged(function: F) -> F:
        return function

    return unchanged


class _NoGil:
    """The mark ``nogil``: a decorator of C functions, and a context manager."""

    def __call__[F: Callable[..., Any]](self, function: F) -> F:
        """Let the compiler refuse a C function that handles Python objects."""
        return function

    def __enter__(self) -> None:
        """Release the interpreter's lock."""

    def __exit__(self, *error: object) -> None:
        """Take the interpreter's lock again."""


nogil = _NoGil()
