"""Whether checkpoints can be written to a folder, and how much fits."""

import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, Verdict

LEAST_FREE_BYTES = 1 << 30
"""Less is worth a note: weights and optimizer states of 75 M parameters take it."""

CHECK = "checkpoint folder"

_PROBE_BYTES = 1 << 16


@dataclass(frozen=True)
class FolderState:
    """What trying to write to a folder gave.

    Attributes:
        path: The folder.
        exists: Whether it is there; else the nearest folder above was tried.
        error: Why nothing can be written, in the system's words; empty if it can.
        is_full: Whether the reason is that nothing more fits.
        free_bytes: Room for this user; ``None`` if the system does not say.
    """

    path: Path
    exists: bool = True
    error: str = ""
    is_full: bool = False
    free_bytes: int | None = None


def look_at_folder(path: Path) -> FolderState:
    """Try to write to a folder. Nothing is left behind, and a missing folder is not made."""
    exists, free_bytes = True, None
    try:
        nearest = path.absolute()
        while not os.path.lexists(nearest):
            nearest, exists = nearest.parent, False
        if not nearest.is_dir():
            return FolderState(path, exists, f"{nearest} is no folder")
        free_bytes = shutil.disk_usage(nearest).free
        _write_and_forget(nearest)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return FolderState(path, exists, reason, error.errno in (errno.ENOSPC, errno.EDQUOT), free_bytes)
    return FolderState(path, exists, free_bytes=free_bytes)


def check_folder(state: FolderState, setting: str) -> Finding:
    """Judge a checkpoint folder.

    Args:
        state: What was found.
        setting: What names the folder, for the advice.
    """
    room = "" if state.free_bytes is None else f", {state.free_bytes / 2**30:,.1f} GiB free"
    if state.is_full:
        return Finding(
            CHECK,
            f"{state.path}: full ({state.error}){room}",
            Verdict.PROBLEM,
            f"make room on the file system of {state.path} (or raise the quota), or give another folder by "
            f"{setting}",
        )
    if state.error:
        return Finding(
            CHECK,
            f"{state.path}: cannot be written ({state.error})",
            Verdict.PROBLEM,
            f"make {state.path} a folder that this user may write to, or give another one by {setting}",
        )
    found = f"{state.path}: {'writable' if state.exists else 'not there yet, can be made'}{room}"
    if state.free_bytes is not None and state.free_bytes < LEAST_FREE_BYTES:
        return Finding(
            CHECK,
            found,
            Verdict.NOTE,
            f"a checkpoint takes about 14 bytes a parameter (bf16, Adam): make room, or give another folder "
            f"by {setting}",
        )
    return Finding(CHECK, found, Verdict.OK)


def _write_and_forget(folder: Path) -> None:
    """Write some bytes to a file without a name, which the system drops whatever happens."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())
