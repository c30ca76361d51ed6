"""Reads and writes ``loads.npy`` of a run: the router counts of every iteration.

Shape letters: I iterations, L MoE layers, D devices, E experts, N nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.records.array_files import ArrayFormat, read_arrays, unreadable
from megatron_fssdp.records.growing_arrays import GrowingArrays

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
        wanted = (len(self.iterations), len(self.layers))
        for name, num_dimensions in ((_COUNTS, 4), (_BY_NODES, 3), (_BY_DEVICES, 3)):
            array = getattr(self, name)
            if array is None and name != _COUNTS:
                continue
            if array.ndim != num_dimensions or array.shape[:2] != wanted or 0 in array.shape:
                raise ValueError(
                    f"{name} has shape {array.shape}, wanted {num_dimensions} dimensions that begin with "
                    f"{wanted}, as iterations and layers say, and none of them empty"
                )
            if np.any(array < 0):
                raise ValueError(f"{name} has negative numbers of tokens")

    def of_iterations(self, chosen: slice) -> "RecordedLoads":
        """Return the loads of some iterations. Every array that has iterations is sliced here and only here.

        Args:
            chosen: Positions of the iterations, such as ``slice(-60, None)`` for the last 60.
        """
        found: dict[str, Any] = {
            name: array[chosen]
            for name, array in vars(self).items()
            if name != "layers" and array is not None
        }
        return replace(self, **found)


class LoadsWriter:
    """Adds router counts to ``loads.npy``, one iteration at a time. A resumed run continues the file.

    Args:
        record_dir: Folder of the run.
        layers: Megatron's number of each recorded layer, in order.

    Raises:
        ConfigurationError: The existing file is damaged, or holds other layers.
    """

    def __init__(self, record_dir: Path | str, layers: Sequence[int]) -> None:
        path = Path(record_dir) / LOADS_FILE
        found = None
        if path.exists():
            found = {name: array for name, array in vars(read_loads(record_dir)).items() if array is not None}
        self._num_layers = len(layers)
        self._arrays = GrowingArrays(path, np.asarray(layers, dtype=np.int64), found)

    def append(
        self,
        iteration: int,
        counts_LDE: NDArray[Any],
        by_nodes_LN: NDArray[np.int64] | None = None,
        by_devices_LD: NDArray[np.int64] | None = None,
    ) -> None:
        """Add one iteration (:class:`RecordedLoads`). Entries from this iteration on are dropped first."""
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


def read_loads(record_dir: Path | str) -> RecordedLoads:
    """Read the router counts of a run, without pickle, also while the run continues.

    Raises:
        ConfigurationError: The file is missing or damaged, or does not hold loads.
    """
    path = Path(record_dir) / LOADS_FILE
    arrays = read_arrays(path, _FORMATS, optional=(_BY_NODES, _BY_DEVICES))
    try:
        return RecordedLoads(**arrays)
    except ValueError as error:
        raise unreadable(path, error) from None
