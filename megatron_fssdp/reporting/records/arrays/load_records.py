"""Reads and writes ``loads.npy`` of a run: the router counts of every iteration.

Shape letters: I iterations, L MoE layers, D devices, E experts, N nodes.

A resumed run continues the same file. If it starts at an iteration that the file already holds, it replaces
the rows from this iteration on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.reporting.records.arrays.array_files import (
    ArrayFormat,
    read_arrays,
    unreadable,
)
from megatron_fssdp.reporting.records.arrays.growing_arrays import GrowingArrays

LOADS_FILE = "loads.npy"

_COUNTS, _BY_NODES, _BY_DEVICES = "counts_ILDE", "by_nodes_ILN", "by_devices_ILD"
_FORMATS = {
    _COUNTS: ArrayFormat(np.int32, 4),
    _BY_NODES: ArrayFormat(np.int64, 3),
    _BY_DEVICES: ArrayFormat(np.int64, 3),
}


@dataclass(frozen=True, eq=False)
class RecordedLoads:
    """Router counts of a run.

    Attributes:
        counts_ILDE: int32 ``[I, L, D, E]``. Tokens that each source device sent to each expert.
        iterations: int64 ``[I]``. Number of each iteration, ascending.
        layers: int64 ``[L]``. Megatron's number of each recorded layer.
        by_nodes_ILN: int64 ``[I, L, N]``. Tokens whose experts are on 1, 2, … N nodes, by the experts'
            owners under plain expert parallelism; N counts the nodes of one expert-parallel group. Zeros
            where it was not recorded. None if no iteration was.
        by_devices_ILD: int64 ``[I, L, D]``. The same for devices; here, D counts the devices of one
            expert-parallel group.
    """

    counts_ILDE: NDArray[np.int32]
    iterations: NDArray[np.int64]
    layers: NDArray[np.int64]
    by_nodes_ILN: NDArray[np.int64] | None = None
    by_devices_ILD: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if self.iterations.ndim != 1 or self.layers.ndim != 1:
            raise ValueError(
                f"iterations have shape {self.iterations.shape} and layers {self.layers.shape}, "
                "wanted one dimension each"
            )
        wanted = (len(self.iterations), len(self.layers))
        if self.counts_ILDE.ndim != 4 or self.counts_ILDE.shape[:2] != wanted:
            raise ValueError(
                f"counts_ILDE has shape {self.counts_ILDE.shape}, "
                f"wanted {wanted} + (D, E), as iterations and layers say"
            )
        if 0 in self.counts_ILDE.shape:
            raise ValueError(
                f"counts_ILDE has shape {self.counts_ILDE.shape}, "
                "wanted at least one iteration, layer, device and expert"
            )
        if np.any(np.diff(self.iterations) <= 0) or np.any(self.iterations < 0):
            raise ValueError("iterations are negative or not ascending")
        if np.any(np.diff(self.layers) <= 0) or np.any(self.layers < 0):
            raise ValueError("layers are negative or not ascending")
        if np.any(self.counts_ILDE < 0):
            raise ValueError("counts_ILDE has negative numbers of tokens")
        for name in (_BY_NODES, _BY_DEVICES):
            found = getattr(self, name)
            if found is not None and (found.shape[:-1] != wanted or np.any(found < 0)):
                raise ValueError(
                    f"{name} has shape {found.shape}, wanted {wanted} and one more dimension, without "
                    "negative numbers"
                )


class LoadsWriter:
    """Adds router counts to ``loads.npy``, one iteration at a time. Each one can be read at once."""

    def __init__(self, record_dir: Path | str, layers: Sequence[int]) -> None:
        """Prepare the file. New iterations are added to existing ones.

        Args:
            record_dir: Folder of the run.
            layers: Megatron's number of each recorded layer, in order.

        Raises:
            ConfigurationError: The existing file is damaged, or holds other layers.
        """
        found = None
        if has_loads(record_dir):
            read = vars(read_loads(record_dir))
            found = {name: array for name, array in read.items() if array is not None}
        self._num_layers = len(layers)
        self._arrays = GrowingArrays(Path(record_dir) / LOADS_FILE, np.asarray(layers, dtype=np.int64), found)

    def append(
        self,
        iteration: int,
        counts_LDE: NDArray[Any],
        by_nodes_LN: NDArray[np.int64] | None = None,
        by_devices_LD: NDArray[np.int64] | None = None,
    ) -> None:
        """Add one iteration. Existing entries from this iteration on are dropped first.

        Args:
            iteration: Number of the iteration.
            counts_LDE: Integers ``[L, D, E]``. Tokens that each source device sent to each expert.
            by_nodes_LN: Tokens whose experts are on 1, 2, … N nodes, int64 ``[L, N]``; None if not known.
            by_devices_LD: Tokens whose experts are on 1, 2, … D devices, int64 ``[L, D]``; None if not known.
        """
        counts = np.array(counts_LDE, dtype=np.int32)
        if counts.ndim != 3 or counts.shape[0] != self._num_layers:
            raise ValueError(f"counts_LDE has shape {counts.shape}, wanted ({self._num_layers}, D, E)")
        entry: dict[str, NDArray[Any]] = {_COUNTS: counts}
        if by_nodes_LN is not None and by_devices_LD is not None:
            entry |= {_BY_NODES: by_nodes_LN, _BY_DEVICES: by_devices_LD}
        self._arrays.append(iteration, entry)

    def close(self) -> None:
        """Close the file."""
        self._arrays.close()


def has_loads(record_dir: Path | str) -> bool:
    """Whether a run has recorded its router counts.

    Args:
        record_dir: Folder of the run.
    """
    return (Path(record_dir) / LOADS_FILE).exists()


def read_loads(record_dir: Path | str) -> RecordedLoads:
    """Read the router counts of a run, without pickle, also while the run continues.

    Args:
        record_dir: Folder of the run.

    Raises:
        ConfigurationError: The file is missing or damaged, or does not hold loads.
    """
    path = Path(record_dir) / LOADS_FILE
    arrays = read_arrays(path, _FORMATS, optional=(_BY_NODES, _BY_DEVICES))
    try:
        return RecordedLoads(**arrays)
    except ValueError as error:
        raise unreadable(path, error) from None
