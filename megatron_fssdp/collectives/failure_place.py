"""Adds to an error the operation in which it happened."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming_failures(place: str) -> Iterator[None]:
    """Note ``place`` in errors, as a lost connection does not show which operation it interrupted."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {place}")
        raise
