"""Reads the array files of a run, which :class:`GrowingArrays` writes."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError

ITERATIONS = "iterations"
LAYERS = "layers"


class ArrayFormat(NamedTuple):
    """Integer data type and number of dimensions that an array must have. Smaller integers are converted."""

    dtype: type[np.integer[Any]]
    num_dimensions: int


_INDEX = ArrayFormat(np.int64, 1)


def read_arrays(
    path: Path, formats: Mapping[str, ArrayFormat], optional: Collection[str] = ()
) -> dict[str, NDArray[Any]]:
    """Read the arrays of a ``.npy`` file of rows, without pickle. Optional ones can be missing.

    Returns:
        The arrays by name, with ``iterations`` int64 ``[I]`` and ``layers`` int64 ``[L]``. The numbers in
        both are ascending and not negative.

    Raises:
        ConfigurationError: The file is missing, damaged or holds something else.
    """
    try:
        rows = npy_format.open_memmap(path, mode="r")
        if rows.dtype.names is None or rows.ndim != 1:
            raise ValueError("the file has no rows of named arrays of numbers")
        content = {name: rows[name] for name in rows.dtype.names}
        if LAYERS in content:
            if np.any(content[LAYERS] != content[LAYERS][0]):
                raise ValueError("the layers differ between iterations")
            content[LAYERS] = content[LAYERS][0]
        found = {
            name: _checked(content, name, wanted)
            for name, wanted in {**formats, ITERATIONS: _INDEX, LAYERS: _INDEX}.items()
            if name in content or name not in optional
        }
        for name in (ITERATIONS, LAYERS):
            if found[name][0] < 0 or np.any(found[name][1:] <= found[name][:-1]):
                raise ValueError(f"{name} are negative or not ascending")
        return found
    except Exception as error:  # damaged files raise many kinds of errors in numpy
        raise unreadable(path, error) from None


def _checked(content: Mapping[str, Any], name: str, wanted: ArrayFormat) -> NDArray[Any]:
    """Return one array of a file in memory of its own, converted to the wanted data type."""
    if name not in content:
        raise ValueError(f"got no array {name}; found: {', '.join(content) or 'no arrays'}")
    array = content[name]
    if array.ndim != wanted.num_dimensions or 0 in array.shape:
        raise ValueError(
            f"{name} has shape {array.shape}, wanted {wanted.num_dimensions} dimensions, none of them empty"
        )
    if array.dtype.kind not in "iu" or not np.can_cast(array.dtype, wanted.dtype):
        raise ValueError(f"{name} has data type {array.dtype}, wanted {np.dtype(wanted.dtype)} or smaller")
    return np.array(array, dtype=wanted.dtype)


def unreadable(path: Path, error: Exception) -> ConfigurationError:
    """Return the error for a record that cannot be read, after the error that reading it raised."""
    if isinstance(error, FileNotFoundError):
        return ConfigurationError(f"{path}: no such file; give the folder of a run that recorded its loads")
    if isinstance(error, NotADirectoryError):
        return ConfigurationError(f"{path.parent}: is a file, wanted the folder of a run")
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ConfigurationError(
        f"{path}: damaged, incomplete or not a record of a run ({reason}); record the run again"
    )
