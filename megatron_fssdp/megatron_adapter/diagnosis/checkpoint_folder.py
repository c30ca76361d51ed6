"""Checks whether checkpoints can be written to a folder, and how much space it has."""

import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict

LEAST_FREE_BYTES = 1 << 30
"""Less free space gives a note. A checkpoint of 75 million parameters takes about this many bytes."""

CHECK = "checkpoint folder"

_PROBE_BYTES = 1 << 16


@dataclass(frozen=True)
class FolderState:
    """Result of a test write to a folder.

    Attributes:
        path: Folder for checkpoints.
        exists: Whether the folder exists. If it does not, the nearest existing folder above it was tested.
        error: The system's message if writing failed; empty if it succeeded.
        is_full: Whether writing failed because the file system or the quota is full.
        free_bytes: Free space for this user in bytes; ``None`` if the system does not tell.
    """

    path: Path
    exists: bool = True
    error: str = ""
    is_full: bool = False
    free_bytes: int | None = None


def look_at_folder(path: Path) -> FolderState:
    """Try to write to a folder. No file is left behind, and a missing folder is not created.

    Args:
        path: Folder for checkpoints.
    """
    exists, free_bytes = True, None
    try:
        nearest = path.absolute()
        while not os.path.lexists(nearest):
            nearest, exists = nearest.parent, False
        if not nearest.is_dir():
            return FolderState(path, exists, f"{nearest} is not a folder")
        free_bytes = shutil.disk_usage(nearest).free
        _write_and_forget(nearest)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return FolderState(path, exists, reason, error.errno in (errno.ENOSPC, errno.EDQUOT), free_bytes)
    return FolderState(path, exists, free_bytes=free_bytes)


def check_folder(state: FolderState, setting: str) -> Finding:
    """Check a checkpoint folder.

    Args:
        state: Result of the test write.
        setting: Option or setting that names the folder, for the advice.
    """
    room = "" if state.free_bytes is None else f", {state.free_bytes / 2**30:,.1f} GiB free"
    if state.is_full:
        return Finding(
            CHECK,
            f"{state.path}: full ({state.error}){room}",
            Verdict.PROBLEM,
            f"make room on the file system of {state.path} (or raise the quota), or set another folder with "
            f"{setting}",
        )
    if state.error:
        return Finding(
            CHECK,
            f"{state.path}: cannot be written ({state.error})",
            Verdict.PROBLEM,
            f"make {state.path} a folder that this user may write to, or set another folder with {setting}",
        )
    found = f"{state.path}: {'writable' if state.exists else 'does not exist yet, can be created'}{room}"
    if state.free_bytes is not None and state.free_bytes < LEAST_FREE_BYTES:
        return Finding(
            CHECK,
            found,
            Verdict.NOTE,
            f"a checkpoint takes about 14 bytes per parameter (bf16, Adam): make room, or set another folder "
            f"with {setting}",
        )
    return Finding(CHECK, found, Verdict.OK)


def _write_and_forget(folder: Path) -> None:
    """Write some bytes to a file without a name, which the system always deletes."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())
