"""Writes files completely or not at all, even if the process is killed while it writes."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError


@contextmanager
def written_whole(folder: Path | str, asked_by: str) -> Iterator[Path]:
    """Yield an empty temporary folder. When the block ends, its files move into ``folder``.

    The files replace those of the same names only after all of them are written. A process that is killed
    leaves at most a folder ``.partial-…`` behind.

    Args:
        folder: Destination of the files. It is created if it does not exist.
        asked_by: The option or setting that names the folder. The error message starts with it.

    Raises:
        ConfigurationError: A file cannot be written because of missing rights, a full disk, or a folder of
            the same name. No file was replaced, unless the final renaming failed.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as scratch:
            partial = Path(scratch)
            yield partial
            names = sorted(path.name for path in partial.iterdir())
            for name in names:
                if (folder / name).is_dir():
                    raise IsADirectoryError(0, "is a folder", str(folder / name))
            for name in names:
                os.replace(partial / name, folder / name)
    except OSError as error:
        raise cannot_write(folder, asked_by, error) from None


def cannot_write(path: Path | str, asked_by: str, error: OSError) -> ConfigurationError:
    """Make the error for a file or folder that the operating system refuses to write.

    Args:
        path: The file or folder.
        asked_by: The option or setting that names it. The error message starts with it.
        error: The operating system's error.

    Returns:
        The error to raise.
    """
    reason = error.strerror or str(error) or type(error).__name__
    return ConfigurationError(
        f"{asked_by} {path}: cannot be written ({reason}); free some space or choose another location"
    )
