"""The cores of this host that a process can use; also the doctor asks, who must not need torch."""

import os


def usable_cores() -> int:
    """Return the number of cores of this host that this process can use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
