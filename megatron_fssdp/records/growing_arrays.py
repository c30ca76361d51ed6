"""Arrays with one entry per iteration, in a ``.npy`` file that grows with its run.

A row has the number of its iteration, those of the layers, and one field for each array, so
``np.load(file)["counts_ILDE"]`` is that array of all iterations. The number of rows in the header is raised
after a row is complete: a process that is killed while it writes loses at most this row, and others can read
the growing file. NumPy leaves space in the header for this (``numpy.lib.format.GROWTH_AXIS_MAX_DIGITS``).
"""

import io
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.files.written_files import cannot_write, written_file
from megatron_fssdp.records.metrics import unreadable

_ITERATIONS, _LAYERS = "iterations", "layers"


class GrowingArrays:
    """Appends rows to the file, which can be read after each one. A resumed run continues the file.

    ``layers`` has Megatron's numbers of the recorded layers. ``read`` reads the folder of the file into a
    record with ``iterations`` and ``layers``. A file of other layers is a ConfigurationError.
    """

    def __init__(self, path: Path, layers: Sequence[int], read: Callable[[Path], Any]) -> None:
        self._path, self._layers = path, np.asarray(layers, np.int64)
        self._row_type: np.dtype[Any] | None = None
        self._iterations: list[int] = []
        if path.exists():
            recorded = read(path.parent)
            if not np.array_equal(recorded.layers, self._layers):
                raise ConfigurationError(
                    f"{path}: holds layers {recorded.layers.tolist()}, but this run records "
                    f"{self._layers.tolist()}; choose another output folder"
                )
            rows = np.load(path, mmap_mode="r")
            if rows.offset != len(_header(rows.dtype, 0)):  # rows are written after a header of our size
                raise ConfigurationError(f"{path}: has another header; choose another output folder")
            self._iterations, self._row_type = recorded.iterations.tolist(), rows.dtype

    def drop_from(self, iteration: int) -> None:
        """Drop the rows from an iteration on, or raise a ConfigurationError; no file is without rows."""
        num_kept = bisect_left(self._iterations, iteration)
        if num_kept == len(self._iterations) or self._row_type is None:
            return
        try:
            if num_kept:  # the next row replaces the bytes behind those that the header counts
                with self._path.open("r+b") as file:
                    file.write(_header(self._row_type, num_kept))
            else:
                self._path.unlink()
                self._row_type = None
        except OSError as error:
            raise cannot_write(self._path, "record_dir", error) from None
        del self._iterations[num_kept:]

    def append_row(self, iteration: int, entry: Mapping[str, NDArray[Any]]) -> None:
        """Add arrays of one iteration, by name. Existing rows from this iteration on are dropped first.

        Other names, shapes or data types than before, or a file that cannot be written, are a
        ConfigurationError that leaves earlier rows unchanged.
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
            if not num_kept:
                with written_file(self._path, "record_dir") as partial:
                    partial.write_bytes(_header(row_type, 1) + row.tobytes())
            else:
                with self._path.open("r+b") as file:  # the header counts the row only while it is complete
                    file.write(_header(row_type, num_kept))
                    file.truncate(file.seek(num_kept * row.nbytes, os.SEEK_CUR))
                    file.write(row.tobytes())
                    file.seek(0)
                    file.write(_header(row_type, num_kept + 1))
        except OSError as error:
            raise cannot_write(self._path, "record_dir", error) from None
        self._iterations[num_kept:] = [iteration]
        self._row_type = row_type


def _header(row_type: np.dtype[Any], num_rows: int) -> bytes:
    """Return the file's header, whose length does not depend on the number of rows."""
    header = io.BytesIO()
    described = {"descr": npy_format.dtype_to_descr(row_type), "fortran_order": False, "shape": (num_rows,)}
    npy_format.write_array_header_1_0(header, described)
    return header.getvalue()


def read_arrays(
    path: Path, num_dimensions: Mapping[str, int], optional: Collection[str] = (), layer_axis: int = 1
) -> dict[str, NDArray[Any]]:
    """Read the named arrays of a file of rows, without pickle, also while the file grows.

    They come with ``iterations`` int64 ``[I]`` and ``layers`` int64 ``[L]``, both ascending. Axes 0
    and ``layer_axis`` are I and L. No number is negative. A ConfigurationError says that the file is missing,
    damaged or something else.
    """
    try:
        rows = npy_format.open_memmap(path, mode="r")
        if rows.dtype.names is None or rows.ndim != 1:
            raise ValueError("the file has no rows of named arrays of numbers")
        wanted = {_LAYERS: 2, _ITERATIONS: 1, **num_dimensions}
        for name in wanted.keys() - rows.dtype.names - set(optional):
            raise ValueError(f"got no array {name}; found: {', '.join(rows.dtype.names)}")
        arrays = {name: np.array(rows[name]) for name in wanted if name in rows.dtype.names}
        num_layers = arrays[_LAYERS].shape[-1]
        for name, array in arrays.items():
            layer_shape = array.shape[1 if name == _LAYERS else layer_axis :][:1]
            if array.ndim != wanted[name] or 0 in array.shape or layer_shape not in ((), (num_layers,)):
                raise ValueError(
                    f"{name} has shape {array.shape}, wanted {wanted[name]} dimensions, none of them empty, "
                    f"and {num_layers} layers"
                )
            if array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64):
                raise ValueError(f"{name} has data type {array.dtype}, wanted int64 or smaller")
            if array.min() < 0:
                raise ValueError(f"{name} has negative numbers")
        if np.any(arrays[_LAYERS] != arrays[_LAYERS][0]):
            raise ValueError("the layers differ between iterations")
        arrays[_LAYERS] = arrays[_LAYERS][0]
        for name in (_ITERATIONS, _LAYERS):
            if np.any(np.diff(arrays[name]) <= 0):
                raise ValueError(f"{name} are not ascending")
        return arrays
    except Exception as error:  # damaged files raise many kinds of errors in numpy
        raise unreadable(path, error) from None
