"""Reads and writes ``loads.npy`` and ``micro_batch_loads.npy`` of a run: the router counts of iterations.

Shape letters: I iterations, Z micro-batches, L MoE layers, D devices, E experts, N nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.records.growing_arrays import GrowingArrays, read_arrays

LOADS_FILE, MICRO_BATCH_LOADS_FILE = "loads.npy", "micro_batch_loads.npy"

STRETCH, MOST_BYTES = 8, 2**27
"""Iterations in a row of which there are counts of micro-batches, or none, because neighbours are compared;
and bytes up to which all have them. Then fewer have: n times as many bytes add only about log n as many."""

_SINGLE = "counts_IZLDE"
_COUNTS, _BY_NODES, _BY_DEVICES = "counts_ILDE", "by_nodes_ILN", "by_devices_ILD"


@dataclass(frozen=True, eq=False)
class RecordedLoads:
    """Router counts of a run.

    ``by_nodes_ILN`` has the tokens whose experts are on 1, 2, … N nodes under plain expert parallelism,
    ``by_devices_ILD`` the same for the D devices of one expert-parallel group. Both are zeros where they were
    not recorded, and None if no iteration was.
    """

    counts_ILDE: NDArray[np.int32]  # tokens that each source device sent to each expert
    iterations: NDArray[np.int64]  # [I], number of each iteration, ascending
    layers: NDArray[np.int64]  # [L], Megatron's number of each recorded layer
    by_nodes_ILN: NDArray[np.int64] | None = None
    by_devices_ILD: NDArray[np.int64] | None = None

    def of_iterations(self, chosen: slice) -> "RecordedLoads":
        """Return the loads at some positions, such as ``slice(-60, None)`` for the last 60 iterations."""
        known = {name: array for name, array in vars(self).items() if array is not None and name != "layers"}
        return replace(self, **{name: array[chosen] for name, array in known.items()})

    def of_layers(self, places: Sequence[int]) -> "RecordedLoads":
        """Return the loads of the layers at some places among the recorded ones."""
        axes = {_COUNTS: -3, _BY_NODES: -2, _BY_DEVICES: -2, "layers": 0}
        known = {name: getattr(self, name) for name in axes}
        return replace(
            self,
            **{name: array.take(places, axes[name]) for name, array in known.items() if array is not None},
        )

    def of_whole_iterations(self) -> "RecordedLoads":
        """Return the loads without an axis of micro-batches, which counts of others may have."""
        counts = self.counts_ILDE
        return replace(self, counts_ILDE=counts.sum(axis=1, dtype=np.int32)) if counts.ndim == 5 else self


class LoadsWriter(GrowingArrays):
    """Adds router counts to ``loads.npy`` of a run."""

    def __init__(self, record_dir: Path | str, layers: Sequence[int]) -> None:
        super().__init__(Path(record_dir) / LOADS_FILE, layers, read_loads)

    def append(
        self,
        iteration: int,
        counts_LDE: NDArray[Any],
        by_nodes_LN: NDArray[np.int64] | None = None,
        by_devices_LD: NDArray[np.int64] | None = None,
    ) -> None:
        """Add one iteration (:class:`RecordedLoads`). Entries from this iteration on are dropped first."""
        entry: dict[str, NDArray[Any]] = {_COUNTS: np.array(counts_LDE, dtype=np.int32)}
        if by_nodes_LN is not None and by_devices_LD is not None:
            entry |= {_BY_NODES: by_nodes_LN, _BY_DEVICES: by_devices_LD}
        self.append_row(iteration, entry)


def read_loads(path: Path | str) -> RecordedLoads:
    """Read the router counts of a run, also while it continues, from its folder or a copy of the file.

    Files that are missing, damaged or something else are a ConfigurationError.
    """
    file = Path(path) / LOADS_FILE if Path(path).is_dir() else Path(path)
    wanted = {_COUNTS: 4, _BY_NODES: 3, _BY_DEVICES: 3}
    return RecordedLoads(**read_arrays(file, wanted, optional=(_BY_NODES, _BY_DEVICES)))


@dataclass(frozen=True, eq=False)
class MicroBatchLoads:
    """Router counts of single micro-batches; zeros where an iteration had fewer of them than others."""

    counts_IZLDE: NDArray[np.int32]  # tokens that each source device sent to each expert
    iterations: NDArray[np.int64]  # [I], number of each iteration, ascending; some may be missing
    layers: NDArray[np.int64]  # [L], Megatron's number of each recorded layer


class MicroBatchLoadsWriter(GrowingArrays):
    """Adds router counts to ``micro_batch_loads.npy`` of a run."""

    def __init__(self, record_dir: Path | str, layers: Sequence[int]) -> None:
        super().__init__(Path(record_dir) / MICRO_BATCH_LOADS_FILE, layers, read_micro_batch_loads)

    def append(self, iteration: int, counts_LZDE: Sequence[NDArray[Any]]) -> None:
        """Add one iteration: an array ``[Z, D, E]`` for each layer, or no arrays if they are not known.

        Entries from this iteration on are dropped first. It is left out if it has one micro-batch, or by
        :data:`MOST_BYTES`. One with more micro-batches than any before begins the file again.
        """
        self.drop_from(iteration)
        num = max(map(len, counts_LZDE), default=0)
        if num < 2:
            return
        width = 0 if self._row_type is None else self._row_type[_SINGLE].shape[0]
        counts_ZLDE = np.zeros((max(num, width), len(counts_LZDE), *counts_LZDE[0].shape[1:]), np.int32)
        for layer, counts_ZDE in enumerate(counts_LZDE):
            counts_ZLDE[: len(counts_ZDE), layer] = counts_ZDE
        stretch = (iteration - 1) // STRETCH
        if stretch % (1 << (stretch * STRETCH * counts_ZLDE.nbytes // MOST_BYTES).bit_length()) == 0:
            if num > width:
                self.drop_from(0)
            self.append_row(iteration, {_SINGLE: counts_ZLDE})


def read_micro_batch_loads(record_dir: Path | str) -> MicroBatchLoads:
    """Read the counts of micro-batches, or raise a ConfigurationError; also while the run continues."""
    path = Path(record_dir) / MICRO_BATCH_LOADS_FILE
    return MicroBatchLoads(**read_arrays(path, {_SINGLE: 5}, layer_axis=2))
