"""Adds to an error the operation in which it happened."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming_failures(place: str) -> Iterator[None]:
    """Add a note with ``place`` to every exception that is raised inside the context.

    Without the note, an error such as a lost connection does not show which operation it interrupted.

    Args:
        place: The operation that runs inside the context, for example "SparseAllGather of layer 3".
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"in {place}")
        raise
