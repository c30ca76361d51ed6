"""Records arrays with one entry per iteration in a ``.npy`` file that grows with its run.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.written_files import cannot_write, written_file
from megatron_fssdp.records.array_files import ITERATIONS, LAYERS

_ASKED_BY = "record_dir"


class GrowingArrays:
    """Appends entries to the file. Each one can be read at once.

    The first entry of a resumed run writes the whole file anew. Each later entry only adds its row.

    Args:
        path: Path of the ``.npy`` file.
        layers: Megatron's number of each recorded layer, in order: int64 ``[L]``.
        found: Arrays of an existing file, as ``read_arrays`` returns them, or None if there is no file.

    Raises:
        ConfigurationError: The existing file holds other layers.
    """

    def __init__(
        self, path: Path, layers: NDArray[np.int64], found: Mapping[str, NDArray[Any]] | None
    ) -> None:
        self._path, self._layers = path, layers
        self._file: BinaryIO | None = None
        self._row_type: np.dtype[Any] | None = None
        self._found = dict(found or {ITERATIONS: np.zeros(0, np.int64), LAYERS: layers})
        self._iterations: list[int] = self._found.pop(ITERATIONS).tolist()
        found_layers = self._found.pop(LAYERS)
        self._shapes = {name: array.shape[1:] for name, array in self._found.items()}
        if not np.array_equal(found_layers, layers):
            raise ConfigurationError(
                f"{path}: holds layers {found_layers.tolist()}, but this run records "
                f"{layers.tolist()}; choose another output folder"
            )

    def append(self, iteration: int, entry: Mapping[str, NDArray[Any]]) -> None:
        """Add one iteration. Existing entries from this iteration on are dropped first.

        Args:
            iteration: Number of the iteration.
            entry: Arrays of the iteration, by name. Names, shapes and data types must be the same in every
                iteration. An array that an existing file lacks has zeros in its iterations.

        Raises:
            ConfigurationError: Shapes differ from those of earlier iterations, an array is missing, or the
                file cannot be written. The entries of earlier iterations are unchanged.
            ValueError: The names or data types differ from those of this writer's first entry.
        """
        row = self._row(iteration, entry)
        if self._file is not None and row.dtype != self._row_type:
            raise ValueError(f"got an entry of {row.dtype}, wanted {self._row_type} as before")
        num_kept = bisect_left(self._iterations, iteration)
        try:
            if self._file is None or num_kept == 0:
                self._file = self._started(row, num_kept)
            else:
                self._add(self._file, row, num_kept)
        except OSError as error:
            raise cannot_write(self._path, _ASKED_BY, error) from None
        self._iterations[num_kept:] = [iteration]
        self._row_type = row.dtype

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _row(self, iteration: int, entry: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Return the row of an iteration: an array of one row."""
        shapes = {name: array.shape for name, array in entry.items()}
        for name, shape in self._shapes.items():
            if shapes.get(name) != shape:
                records = f"records {shapes[name]}" if name in shapes else "does not record it"
                raise ConfigurationError(
                    f"{self._path}: holds {name} of shape {shape}, but this run {records}; choose another "
                    "output folder"
                )
        self._shapes = shapes
        fields = {ITERATIONS: np.array(iteration, np.int64), LAYERS: self._layers, **entry}
        row = np.zeros(1, [(name, array.dtype, array.shape) for name, array in fields.items()])
        for name, array in fields.items():
            row[name] = array
        return row

    def _started(self, row: NDArray[Any], num_kept: int) -> BinaryIO:
        """Write the file anew, with the found iterations that are kept and one row after them."""
        kept = np.zeros(num_kept, row.dtype)
        kept[ITERATIONS], kept[LAYERS] = self._iterations[:num_kept], self._layers
        for name, array in self._found.items():
            kept[name] = array[:num_kept]
        with written_file(self._path, _ASKED_BY) as partial:
            partial.write_bytes(_header(row.dtype, num_kept + 1) + kept.tobytes() + row.tobytes())
        self.close()
        self._found.clear()
        return self._path.open("r+b", buffering=0)

    def _add(self, file: BinaryIO, row: NDArray[Any], num_kept: int) -> None:
        """Write a row after the kept ones. The header counts a row only while it is complete."""
        end = len(_header(row.dtype, num_kept)) + num_kept * row.nbytes
        if num_kept < len(self._iterations):
            os.pwrite(file.fileno(), _header(row.dtype, num_kept), 0)
            file.truncate(end)
        file.seek(end)
        content = memoryview(row.tobytes())
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            file.truncate(end)
            raise
        os.pwrite(file.fileno(), _header(row.dtype, num_kept + 1), 0)


def _header(row_type: np.dtype[Any], num_rows: int) -> bytes:
    """Return the header of the file. Its length does not depend on the number of rows."""
    header = io.BytesIO()
    described = {"descr": npy_format.dtype_to_descr(row_type), "fortran_order": False, "shape": (num_rows,)}
    npy_format.write_array_header_1_0(header, described)
    return header.getvalue()
