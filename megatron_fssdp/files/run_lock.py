"""A lock that a live run holds on its folder, so that no other process writes there.

The system frees it when its holder ends, also if it was killed. The file stays, with a text for messages.
"""

import fcntl
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.files.written_files import cannot_write

LOCK_FILE = ".lock"
HELD_VARIABLE = "MEGATRON_FSSDP_HELD_FOLDER"
"""By this variable, ``train`` tells its ranks the folder that it holds for them."""

_held: dict[Path, IO[str]] = {}


def hold(folder: Path, asked_by: str) -> int:
    """Create and hold a run's folder until :func:`release`, or raise a ConfigurationError.

    Returns the lock's file descriptor. Processes that inherit it hold the folder, too. It is -1 if the file
    system has no locks, or if the process that started this one holds the folder for it.
    """
    place = folder.resolve()
    if _is_held_for_us(place):
        return -1
    if place not in _held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / LOCK_FILE).open("a+", encoding="utf-8")
        except OSError as error:
            raise cannot_write(folder, asked_by, error) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise _taken(folder, asked_by) from None
        except OSError:
            file.close()
            return -1  # the file system has no locks
        with suppress(OSError):  # a full disk does not matter here
            file.truncate(0)
            file.write(json.dumps({"host": socket.gethostname(), "process": os.getpid()}))
            file.flush()
        _held[place] = file
    return _held[place].fileno()


def release(folder: Path) -> None:
    """Let others use a folder that this process holds."""
    if file := _held.pop(folder.resolve(), None):
        file.close()


def holds(folder: Path) -> bool:
    """Whether this process itself holds a folder."""
    return folder.resolve() in _held


def refuse_live(folder: Path, asked_by: str) -> None:
    """Raise a ConfigurationError if a run of others holds a folder; nothing is written."""
    if _is_held_for_us(folder.resolve()) or holds(folder):
        return
    # Without a file, or on a file system without locks, nobody holds the folder.
    with suppress(OSError), (folder / LOCK_FILE).open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken(folder, asked_by) from None


def _is_held_for_us(place: Path) -> bool:
    return os.environ.get(HELD_VARIABLE) == str(place)


def _taken(folder: Path, asked_by: str) -> ConfigurationError:
    holder = {"process": "unknown", "host": "an unknown host"}
    with suppress(OSError, ValueError):
        holder |= json.loads((folder / LOCK_FILE).read_text(encoding="utf-8"))
    return ConfigurationError(
        f"{asked_by} {folder}: a run is in progress here (process {holder['process']} on {holder['host']}); "
        "wait for it or end it, or give another folder"
    )
