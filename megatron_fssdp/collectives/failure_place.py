"""Adds to an error the operation in which it happened."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming_failures(place: str) -> Iterator[None]:
    """Add a note with ``place``, such as "SparseAllGather of layer 3", to errors inside the context.

    An error such as a lost connection does not show by itself which operation it interrupted.
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"in {place}")
        raise
