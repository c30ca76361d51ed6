"""Files that are there whole or not at all, however the writing ends."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError


@contextmanager
def written_whole(folder: Path | str, asked_by: str) -> Iterator[Path]:
    """An empty folder to write files into, which replace those of the same names when all are written.

    A process that is killed leaves a folder ``.partial-…`` at most.

    Args:
        folder: Where the files are to be; it is made if it is not there.
        asked_by: The option or setting that names it; starts the message.

    Raises:
        ConfigurationError: A file cannot be written, because of rights, a full disk or a folder in its place.
            Nothing was replaced, unless the very last step failed.
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
    """What to say where the system refuses to write.

    Args:
        path: The file or folder.
        asked_by: The option or setting that names it.
        error: What the system said.
    """
    reason = error.strerror or str(error) or type(error).__name__
    return ConfigurationError(
        f"{asked_by} {path}: cannot be written ({reason}); make room or choose another place"
    )
