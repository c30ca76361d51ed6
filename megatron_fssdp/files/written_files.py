"""Writes files completely or not at all, even if the process is killed while it writes.

An existing file is replaced only if this package wrote it, which its beginning shows: it has the first line
of what replaces it, or is empty. ``asked_by`` is the option or setting that names a file or folder; messages
start with it.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError

_BEGINNING_BYTES = 512
_LINE_BYTES = 32
"""Enough for the words with which our files begin, and less than what differs between two of a kind."""


@contextmanager
def written_whole(folder: Path | str, asked_by: str) -> Iterator[Path]:
    """Yield an empty temporary folder. When the block ends, its files move into ``folder``.

    A process that is killed leaves at most a folder ``.partial-…`` behind.

    Raises:
        ConfigurationError: A file cannot be written. No file was replaced, unless the final renaming failed.
    """
    folder = Path(folder)
    refuse_non_folder(folder, asked_by)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as scratch:
            partial = Path(scratch)
            yield partial
            names = sorted(path.name for path in partial.iterdir())
            for name in names:
                with (partial / name).open("rb") as file:
                    refuse_foreign(folder / name, asked_by, file.read(_BEGINNING_BYTES))
            for name in names:
                os.replace(partial / name, folder / name)
    except OSError as error:
        raise cannot_write(folder, asked_by, error) from None


@contextmanager
def written_file(path: Path | str, asked_by: str) -> Iterator[Path]:
    """Yield the temporary path of one file; before, refuse a ``path`` that is no regular file."""
    path = Path(path)
    refuse_special_file(path, asked_by)
    with written_whole(path.parent, asked_by) as partial:
        yield partial / path.name


def refuse_foreign(path: Path | str, asked_by: str, beginning: bytes) -> None:
    """Raise a ConfigurationError where a file with this beginning would replace what is not our own.

    Commands that work for minutes call this before.
    """
    refuse_special_file(path, asked_by)
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        existing = file.read(_BEGINNING_BYTES)
    if existing and _mark(existing) != _mark(beginning):
        raise ConfigurationError(
            f"{asked_by} {path}: exists, and this command did not write it; give another path or remove it"
        )


def _mark(beginning: bytes) -> bytes:
    """Return what files of one kind have in common: the first line or bytes."""
    is_binary = b"\0" in beginning[:_LINE_BYTES]
    return beginning[:4] if is_binary else beginning.partition(b"\n")[0][:_LINE_BYTES]


def refuse_special_file(path: Path | str, asked_by: str) -> None:
    """Raise a ConfigurationError where a file would replace a folder, a device or a pipe."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigurationError(f"{asked_by} {path}: is {_kind(path)}, wanted a file; give another path")


def refuse_non_folder(path: Path | str, asked_by: str) -> None:
    """Raise a ConfigurationError for a path of which a part, or all, is something else than a folder."""
    path = Path(path)
    for part in (path, *path.parents):
        if os.path.exists(part) and not os.path.isdir(part):
            which = "" if part == path else f"{part} "
            raise ConfigurationError(
                f"{asked_by} {path}: {which}is not a folder but {_kind(part)}; give another path"
            )


def refuse_unwritable(path: Path | str, asked_by: str) -> None:
    """Raise a ConfigurationError where a file or folder cannot be made; nothing stays of the attempt.

    Only an attempt tells, because permissions say nothing about root, ``/proc`` and read-only file systems.
    """
    path = Path(path)
    refuse_non_folder(path.parent, asked_by)
    nearest = next(part for part in (path, *path.parents) if os.path.isdir(part))
    try:
        tempfile.TemporaryDirectory(dir=nearest, prefix=".partial-").cleanup()
    except OSError as error:
        raise ConfigurationError(
            f"{asked_by} {path}: got {nearest}, where nothing can be written ({error.strerror}), wanted a "
            "folder that you may write to; give another path"
        ) from None


def cannot_write(path: Path | str, asked_by: str, error: OSError) -> ConfigurationError:
    """Return the error for a file or folder that the operating system refuses to write."""
    reason = error.strerror or str(error) or type(error).__name__
    return ConfigurationError(
        f"{asked_by} {path}: cannot be written ({reason}); free some space or choose another location"
    )


def _kind(path: Path | str) -> str:
    if os.path.isdir(path):
        return "a folder"
    return "a file" if os.path.isfile(path) else "a device or a pipe"
