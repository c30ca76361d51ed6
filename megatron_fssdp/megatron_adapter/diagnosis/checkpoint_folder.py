"""Checks whether checkpoints can be written to a folder, and how much space it has."""

import os
import shutil
import tempfile
from pathlib import Path

from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, note, problem

LEAST_FREE_BYTES = 1 << 30
"""Less free space gives a note. A checkpoint of 75 million parameters takes about this many bytes."""


def check_folder(path: Path, setting: str) -> Finding:
    """Try to write to a folder for checkpoints, which ``setting`` names, or to the nearest one that exists.

    No file is left behind, and a missing folder is not created.
    """
    name, nearest = "checkpoint folder", path.absolute()
    try:
        while not os.path.lexists(nearest):
            nearest = nearest.parent
        free_bytes = shutil.disk_usage(nearest).free
        with tempfile.TemporaryFile(dir=nearest) as file:  # It has no name, and the system always deletes it.
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        found = f"{path}: cannot be written ({error.strerror or type(error).__name__})"
        advice = f"make {path} a folder with free space that this user may write to"
        return problem(name, found, f"{advice}, or set another folder with {setting}")
    state = "writable" if nearest == path.absolute() else "does not exist yet, can be created"
    found = f"{path}: {state}, {free_bytes / 2**30:,.1f} GiB free"
    if free_bytes >= LEAST_FREE_BYTES:
        return Finding(name, found)
    advice = "a checkpoint takes about 14 bytes per parameter (bf16, Adam)"
    return note(name, found, f"{advice}: make room, or set another folder with {setting}")
