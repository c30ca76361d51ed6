"""Checks whether checkpoints can be written to a folder, and how much space it has."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, note, problem

LEAST_FREE_BYTES = 1 << 30
"""Less free space gives a note. A checkpoint of 75 million parameters takes about this many bytes."""

_PROBE_BYTES = 1 << 16


def check_folder(path: Path, setting: str) -> Finding:
    """Try to write to a folder for checkpoints, which ``setting`` names, or to the nearest one that exists.

    No file is left behind, and a missing folder is not created.
    """
    name, room, nearest = "checkpoint folder", "", path.absolute()
    other = f"set another folder with {setting}"
    try:
        while not os.path.lexists(nearest):
            nearest = nearest.parent
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a folder")
        free_bytes = shutil.disk_usage(nearest).free
        room = f", {free_bytes / 2**30:,.1f} GiB free"
        _write_and_forget(nearest)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f"make room on the file system of {path} (or raise the quota), or {other}"
            return problem(name, f"{path}: full ({reason}){room}", advice)
        advice = f"make {path} a folder that this user may write to, or {other}"
        return problem(name, f"{path}: cannot be written ({reason})", advice)
    state = "writable" if nearest == path.absolute() else "does not exist yet, can be created"
    found = f"{path}: {state}{room}"
    if free_bytes < LEAST_FREE_BYTES:
        advice = f"a checkpoint takes about 14 bytes per parameter (bf16, Adam): make room, or {other}"
        return note(name, found, advice)
    return Finding(name, found)


def _write_and_forget(folder: Path) -> None:
    """Write some bytes to a file without a name, which the system always deletes."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())
