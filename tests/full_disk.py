"""Writes that fail half-way."""

import resource
from contextlib import contextmanager


@contextmanager
def room_for(num_bytes):
    """Limit the size of files, so that writes fail half-way as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
