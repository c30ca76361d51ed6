"""Records arrays with one entry per iteration in an ``.npz`` file that is always complete.

The file grows with its run. If a resumed run starts at an iteration that the file already holds, the run
replaces the entries from this iteration on.
"""

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.written_files import written_file

ITERATIONS = "iterations"
LAYERS = "layers"

# Every write replaces the whole file. Writing may take at most this share of the time.
_MAX_WRITE_SHARE = 0.05
_MIN_WRITE_INTERVAL_S = 10.0


class ArrayFormat(NamedTuple):
    """Format that an array in a file must have.

    Attributes:
        dtype: Integer data type. Arrays of smaller integers are converted to it.
        num_dimensions: Number of dimensions. Each dimension must have at least one entry.
    """

    dtype: type[np.integer[Any]]
    num_dimensions: int


_INDEX = ArrayFormat(np.int64, 1)


class GrowingArrays:
    """Collects entries in memory, and writes the file at intervals and on :meth:`close`.

    Args:
        path: Path of the ``.npz`` file.
        layers: Megatron's number of each recorded layer, in order: int64 ``[L]``.
        found: Arrays that :func:`read_arrays` read from an existing file, or None if there is no file.

    Raises:
        ConfigurationError: The existing file holds other layers.
    """

    def __init__(
        self, path: Path, layers: NDArray[np.int64], found: Mapping[str, NDArray[Any]] | None
    ) -> None:
        self._path = path
        self._layers = layers
        self._iterations: list[int] = []
        self._entries: list[dict[str, NDArray[Any]]] = []
        self._last_write_s = time.monotonic()
        self._write_interval_s = _MIN_WRITE_INTERVAL_S
        self._dirty = False
        if found is None:
            return
        if not np.array_equal(found[LAYERS], layers):
            raise ConfigurationError(
                f"{path}: holds layers {found[LAYERS].tolist()}, but this run records "
                f"{layers.tolist()}; choose another output folder"
            )
        self._iterations = found[ITERATIONS].tolist()
        names = [name for name in found if name not in (ITERATIONS, LAYERS)]
        self._entries = [{name: found[name][i] for name in names} for i in range(len(self._iterations))]

    def append(self, iteration: int, entry: Mapping[str, NDArray[Any]]) -> None:
        """Add one iteration. Existing entries from this iteration on are dropped first.

        Args:
            iteration: Number of the iteration.
            entry: Arrays of the iteration, by name. Shapes must be the same in every iteration. An array that
                the existing file lacks has zeros in its iterations.

        Raises:
            ConfigurationError: The shapes differ from those of earlier iterations.
        """
        while self._iterations and self._iterations[-1] >= iteration:
            self._iterations.pop()
            self._entries.pop()
        for name, array in entry.items():
            if self._entries and name not in self._entries[-1]:
                for earlier in self._entries:
                    earlier[name] = np.zeros_like(array)
            if self._entries and array.shape != self._entries[-1][name].shape:
                raise ConfigurationError(
                    f"{self._path}: holds {name} of shape {self._entries[-1][name].shape}, but this run "
                    f"records {array.shape}; choose another output folder"
                )
        self._iterations.append(iteration)
        self._entries.append(dict(entry))
        self._dirty = True
        if time.monotonic() - self._last_write_s >= self._write_interval_s:
            self.write()

    def write(self) -> None:
        """Write the file now.

        Raises:
            ConfigurationError: The file cannot be written. The old file is unchanged.
        """
        if not self._dirty:
            return
        start_s = time.monotonic()
        stacked = {name: np.stack([entry[name] for entry in self._entries]) for name in self._entries[0]}
        iterations = np.asarray(self._iterations, dtype=np.int64)
        with written_file(self._path, "record_dir") as partial, partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **stacked, **{ITERATIONS: iterations, LAYERS: self._layers})
        self._last_write_s = time.monotonic()
        self._write_interval_s = max(_MIN_WRITE_INTERVAL_S, (self._last_write_s - start_s) / _MAX_WRITE_SHARE)
        self._dirty = False

    def close(self) -> None:
        """Write the entries that are not yet in the file."""
        self.write()


def read_arrays(
    path: Path, formats: Mapping[str, ArrayFormat], optional: Collection[str] = ()
) -> dict[str, NDArray[Any]]:
    """Read arrays, iteration numbers and layer numbers from a file, without pickle.

    Args:
        path: Path of the ``.npz`` file.
        formats: Wanted format of each array, by name.
        optional: Names of arrays that earlier versions did not write. The result lacks those that the file
            lacks.

    Returns:
        The arrays by name, with ``iterations`` int64 ``[I]`` and ``layers`` int64 ``[L]``. The numbers in
        both are ascending and not negative.

    Raises:
        ConfigurationError: The file is missing, damaged or holds something else.
    """
    try:
        content = np.load(path, allow_pickle=False)
        if not isinstance(content, np.lib.npyio.NpzFile):
            raise ValueError("the file is one array, not an archive of arrays")
        with content:
            found = {
                name: _array(content, name, wanted)
                for name, wanted in {**formats, ITERATIONS: _INDEX, LAYERS: _INDEX}.items()
                if name in content or name not in optional
            }
        for name in (ITERATIONS, LAYERS):
            if found[name][0] < 0 or np.any(found[name][1:] <= found[name][:-1]):
                raise ValueError(f"{name} are negative or not ascending")
        return found
    except Exception as error:  # damaged files raise many kinds of errors in zipfile, zlib and numpy
        raise unreadable(path, error) from None


def _array(content: Mapping[str, Any], name: str, wanted: ArrayFormat) -> NDArray[Any]:
    """Return one array of a file, converted to the wanted data type.

    Raises:
        ValueError: The array is missing or has another format.
    """
    if name not in content:
        raise ValueError(f"got no array {name}; found: {', '.join(content) or 'no arrays'}")
    try:
        array = content[name]
    except Exception as error:  # damaged files raise many kinds of errors in zipfile, zlib and numpy
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} is not an array")
    if array.ndim != wanted.num_dimensions or 0 in array.shape:
        raise ValueError(
            f"{name} has shape {array.shape}, wanted {wanted.num_dimensions} dimensions, none of them empty"
        )
    if array.dtype.kind not in "iu" or not np.can_cast(array.dtype, wanted.dtype):
        raise ValueError(f"{name} has data type {array.dtype}, wanted {np.dtype(wanted.dtype)} or smaller")
    return array.astype(wanted.dtype, copy=False)


def unreadable(path: Path, error: Exception) -> ConfigurationError:
    """Make the error for a record that cannot be read.

    Args:
        path: Path of the record.
        error: The error that reading it raised.
    """
    if isinstance(error, FileNotFoundError):
        return ConfigurationError(f"{path}: no such file; give the folder of a run that recorded its loads")
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ConfigurationError(
        f"{path}: damaged, incomplete or not a record of a run ({reason}); record the run again"
    )
