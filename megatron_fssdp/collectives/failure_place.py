"""Errors that say where they happened."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming_failures(place: str) -> Iterator[None]:
    """Add a note to what is raised inside: a lost connection alone does not tell whose it was.

    Args:
        place: What is being done, for example "SparseAllGather of layer 3".
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"in {place}")
        raise
