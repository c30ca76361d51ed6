"""Arrays with one entry per iteration, in a ``.npy`` file that grows with its run.

The file is a NumPy array of rows, one row per iteration. A row has the number of its iteration, the numbers
of the layers, and one field for each array. ``np.load(file)["counts_ILDE"]`` is therefore that array of all
iterations. An iteration costs one write of its own bytes.

The file's header has the number of rows. It is raised after a row is complete. A process that is killed while
it writes therefore loses at most the iteration that it was writing, and other processes can read the file
while it grows. NumPy leaves space in the header for this (``numpy.lib.format.GROWTH_AXIS_MAX_DIGITS``).
"""

import io
import os
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.written_files import cannot_write, written_file
from megatron_fssdp.records.json_lines import unreadable, write_at_end

_ITERATIONS, _LAYERS = "iterations", "layers"


class GrowingArrays:
    """Appends rows to the file, which can be read after each one. A resumed run continues the file.

    Args:
        path: Path of the ``.npy`` file.
        layers: Megatron's number of each recorded layer, in order.

    Raises:
        ConfigurationError: The existing file is damaged, or holds other layers.
    """

    def __init__(self, path: Path, layers: Sequence[int]) -> None:
        self._path, self._layers = path, np.asarray(layers, np.int64)
        self._file: io.FileIO | None = None
        self._found: NDArray[Any] | None = None  # rows of an earlier start
        self._iterations: list[int] = []
        if path.exists():
            found = read_arrays(path, {})
            self._found, self._iterations = np.load(path, mmap_mode="r"), found[_ITERATIONS].tolist()
            if not np.array_equal(found[_LAYERS], self._layers):
                raise ConfigurationError(
                    f"{path}: holds layers {found[_LAYERS].tolist()}, but this run records "
                    f"{self._layers.tolist()}; choose another output folder"
                )
        self._row_type = None if self._found is None else self._found.dtype

    def append_row(self, iteration: int, entry: Mapping[str, NDArray[Any]]) -> None:
        """Add one iteration. Existing rows from this iteration on are dropped first.

        Args:
            iteration: Number of the iteration.
            entry: Arrays of the iteration, by name. Names, shapes and data types must be the same in every
                iteration.

        Raises:
            ConfigurationError: The arrays differ from those of earlier iterations, or the file cannot be
                written. The rows of earlier iterations are unchanged.
        """
        fields = {_ITERATIONS: np.array(iteration, np.int64), _LAYERS: self._layers, **entry}
        row_type = np.dtype([(name, array.dtype, array.shape) for name, array in fields.items()])
        if self._row_type not in (None, row_type):
            raise ConfigurationError(
                f"{self._path}: holds arrays {self._row_type}, but this run records {row_type}; choose "
                "another output folder"
            )
        row = np.array([tuple(fields.values())], row_type)
        num_kept = bisect_left(self._iterations, iteration)
        try:
            if self._file is None or num_kept == 0:
                self._file = self._started(row, num_kept)
            else:
                self._add(self._file, row, num_kept)
        except OSError as error:
            raise cannot_write(self._path, "record_dir", error) from None
        self._iterations[num_kept:] = [iteration]
        self._row_type = row_type

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _started(self, row: NDArray[Any], num_kept: int) -> io.FileIO:
        """Write the file anew, with the found rows that are kept and one row after them."""
        kept = b"" if self._found is None else self._found[:num_kept].tobytes()
        with written_file(self._path, "record_dir") as partial:
            partial.write_bytes(_header(row.dtype, num_kept + 1) + kept + row.tobytes())
        self.close()
        self._found = None
        return io.FileIO(self._path, "r+b")

    def _add(self, file: io.FileIO, row: NDArray[Any], num_kept: int) -> None:
        """Write a row after the kept ones. The header counts a row only while it is complete."""
        end = len(_header(row.dtype, num_kept)) + num_kept * row.nbytes
        if num_kept < len(self._iterations):
            os.pwrite(file.fileno(), _header(row.dtype, num_kept), 0)
            file.truncate(end)
        file.seek(end)
        write_at_end(file, end, row.tobytes())
        os.pwrite(file.fileno(), _header(row.dtype, num_kept + 1), 0)


def _header(row_type: np.dtype[Any], num_rows: int) -> bytes:
    """Return the header of the file. Its length does not depend on the number of rows."""
    header = io.BytesIO()
    described = {"descr": npy_format.dtype_to_descr(row_type), "fortran_order": False, "shape": (num_rows,)}
    npy_format.write_array_header_1_0(header, described)
    return header.getvalue()


def read_arrays(
    path: Path, num_dimensions: Mapping[str, int], optional: Collection[str] = ()
) -> dict[str, NDArray[Any]]:
    """Read arrays of a file of rows, without pickle, also while the file grows.

    Args:
        path: Path of the ``.npy`` file.
        num_dimensions: Number of dimensions of each array that is read, with iterations and layers.
        optional: Names of arrays that can be missing.

    Returns:
        The arrays by name, with ``iterations`` int64 ``[I]`` and ``layers`` int64 ``[L]``. The numbers in
        both are ascending. No number is negative.

    Raises:
        ConfigurationError: The file is missing, damaged or holds something else.
    """
    try:
        rows = npy_format.open_memmap(path, mode="r")
        if rows.dtype.names is None or rows.ndim != 1:
            raise ValueError("the file has no rows of named arrays of numbers")
        wanted = {_ITERATIONS: 1, _LAYERS: 2, **num_dimensions}
        for name in wanted.keys() - rows.dtype.names - set(optional):
            raise ValueError(f"got no array {name}; found: {', '.join(rows.dtype.names)}")
        found = {
            name: _checked(name, rows[name], wanted[name]) for name in wanted if name in rows.dtype.names
        }
        if np.any(found[_LAYERS] != found[_LAYERS][0]):
            raise ValueError("the layers differ between iterations")
        found[_LAYERS] = found[_LAYERS][0]
        for name in (_ITERATIONS, _LAYERS):
            if np.any(np.diff(found[name]) <= 0):
                raise ValueError(f"{name} are not ascending")
        for name, array in found.items():
            if array.ndim > 1 and array.shape[1] != len(found[_LAYERS]):
                raise ValueError(f"{name} has shape {array.shape}, wanted {len(found[_LAYERS])} layers")
        return found
    except Exception as error:  # damaged files raise many kinds of errors in numpy
        raise unreadable(path, error) from None


def _checked(name: str, array: NDArray[Any], num_dimensions: int) -> NDArray[Any]:
    """Return one array of a file in memory of its own."""
    if array.ndim != num_dimensions or 0 in array.shape:
        raise ValueError(
            f"{name} has shape {array.shape}, wanted {num_dimensions} dimensions, none of them empty"
        )
    if array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64):
        raise ValueError(f"{name} has data type {array.dtype}, wanted int64 or smaller")
    if array.min() < 0:
        raise ValueError(f"{name} has negative numbers")
    return np.array(array)
