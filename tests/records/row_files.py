"""Array files of any content, in the form of ``loads.npy`` and ``placements.npy``."""

from pathlib import Path

import numpy as np


def rows_in(file: Path) -> dict[str, np.ndarray]:
    """Each field of all rows, by name; ``layers`` therefore has a row for each iteration."""
    rows = np.load(file)
    return {name: rows[name].copy() for name in rows.dtype.names}


def save_rows(file: Path, **content: np.ndarray) -> None:
    """Write arrays as rows; their first dimensions must be equal."""
    fields = [(name, array.dtype, array.shape[1:]) for name, array in content.items()]
    rows = np.zeros(len(next(iter(content.values()), ())), fields)
    for name, array in content.items():
        rows[name] = array
    np.save(file, rows)
