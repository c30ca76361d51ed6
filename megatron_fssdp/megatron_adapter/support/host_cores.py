"""The cores of this host that a process can use."""

import os


def usable_cores() -> int:
    """Return the number of cores of this host that this process can use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
