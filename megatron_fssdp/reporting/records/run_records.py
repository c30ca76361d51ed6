"""Reads and writes two record files of a run: ``metrics.jsonl`` and ``loads.npz``.

Shape letters: I iterations, L MoE layers, D devices, E experts, N nodes.

A resumed run continues the same files. If it starts at an iteration that the files already hold, it replaces
the records from this iteration on.
"""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.json_records import Count, parse_record
from megatron_fssdp.config.written_files import cannot_write
from megatron_fssdp.reporting.records.growing_arrays import (
    ArrayFormat,
    GrowingArrays,
    read_arrays,
    unreadable,
)
from megatron_fssdp.reporting.records.run_session import RunSession

METRICS_FILE = "metrics.jsonl"
LOADS_FILE = "loads.npz"

_COUNTS, _BY_NODES, _BY_DEVICES = "counts_ILDE", "by_nodes_ILN", "by_devices_ILD"

# Limit of numbers in a record, which detects damaged records.
_Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclasses.dataclass(frozen=True)
class LayerMetrics:
    """Metrics of one MoE layer in one iteration.

    Attributes:
        layer: Megatron's number of the layer, from 1.
        ep_load_max_over_mean: Max/mean device load that plain expert parallelism would have had, where every
            expert is only on its owner.
        load_max_over_mean: Max/mean device load under the placement that was used.
        num_replicas: Number of replicas of all experts.
        spag_bytes: Bytes that SparseAllGather moved, over all devices.
        sprs_bytes: Bytes that SparseReduceScatter moved, over all devices.
        cross_node_tokens: Number of dispatched tokens whose expert was on another node.
        spag_s: Seconds of SparseAllGather on device 0 of each expert-parallel group (not on the slowest
            device), averaged over the groups.
        spag_exposed_s: The part of ``spag_s`` in which the device's compute waited for the transfer.
        sprs_s: Seconds of SparseReduceScatter on device 0 of each expert-parallel group, averaged over the
            groups.
        sprs_exposed_s: The part of ``sprs_s`` in which the device's compute waited for the transfer.
        load_similarity: Share of the load that is on the same experts as in the iteration recorded before
            (Pro-Prophet's locality). None in the first iteration.
        balance_ratio: Standard deviation of the device loads under plain expert parallelism, divided by the
            one under the placement that was used (Pro-Prophet's RB). None if the latter is 0.
        schedule: Order of the collectives in the last forward pass (Parm's schedules).
        schedule_predicted_s: Modelled seconds of a forward pass's collectives under each schedule, by
            schedule, if several schedules were compared.
        strategy: Strategy that ``auto`` selected for the layer. None under other strategies.
    """

    layer: Count
    ep_load_max_over_mean: _Figure
    load_max_over_mean: _Figure
    num_replicas: Count
    spag_bytes: Count
    sprs_bytes: Count
    cross_node_tokens: Count
    spag_s: _Figure = 0.0
    spag_exposed_s: _Figure = 0.0
    sprs_s: _Figure = 0.0
    sprs_exposed_s: _Figure = 0.0
    load_similarity: _Figure | None = None
    balance_ratio: _Figure | None = None
    schedule: str | None = None
    schedule_predicted_s: dict[str, _Figure] | None = None
    strategy: str | None = None


@dataclasses.dataclass(frozen=True)
class IterationMetrics:
    """Metrics of one training iteration.

    Attributes:
        iteration: Number of the iteration, from 1.
        lm_loss: Language-model loss. NaN if it was not finite or not known.
        grad_norm: Global gradient norm. None if Megatron did not compute it.
        iteration_s: Duration of the iteration in wall-clock seconds.
        tokens_per_s: Tokens of the global batch per second.
        layers: Metrics of the MoE layers, in order.
        resharded_experts: Number of experts whose owner or slot changed before the iteration, over all
            pipeline stages. 0 if no re-shard happened.
        reshard_bytes: Bytes that the re-shard moved between devices, over all devices.
        reshard_s: Seconds of the re-shard on device 0 of the slowest expert-parallel group. Part of
            ``iteration_s``.
        passes_s: Seconds of forward and backward passes on global rank 0, including the reduction of
            gradients. Part of ``iteration_s``. 0 if it was not recorded.
        rank_peak_bytes: Peak memory of each global rank so far, in bytes. Empty if it was not recorded in
            this iteration.
        rank_memory: Kind of memory of ``rank_peak_bytes``: ``allocated`` by torch on the GPU, or ``resident``
            in the host's memory, libraries included.
        session: The start of the training, in its first iteration. None in all others.
    """

    iteration: Count
    lm_loss: Annotated[float, BeforeValidator(lambda loss: math.nan if loss is None else loss)]
    grad_norm: _Figure | None
    iteration_s: _Figure
    tokens_per_s: _Figure
    layers: tuple[LayerMetrics, ...] = ()
    resharded_experts: Count = 0
    reshard_bytes: Count = 0
    reshard_s: _Figure = 0.0
    passes_s: _Figure = 0.0
    rank_peak_bytes: tuple[Count, ...] = ()
    rank_memory: str | None = None
    session: RunSession | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedLoads:
    """Router counts of a run.

    Attributes:
        counts_ILDE: int32 ``[I, L, D, E]``. Tokens that each source device sent to each expert.
        iterations: int64 ``[I]``. Number of each iteration, ascending.
        layers: int64 ``[L]``. Megatron's number of each recorded layer.
        by_nodes_ILN: int64 ``[I, L, N]``. Tokens whose experts are on 1, 2, … N nodes, by the experts'
            owners under plain expert parallelism; N counts the nodes of one expert-parallel group. Zeros
            where it was not recorded. None in files of earlier versions.
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


class MetricsWriter:
    """Appends one JSON line per iteration to ``metrics.jsonl``, each completely and without delay.

    Raises:
        ConfigurationError: The file cannot be written.
    """

    def __init__(self, record_dir: Path | str) -> None:
        self._path = Path(record_dir) / METRICS_FILE
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _cut_half_written_line(self._path)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise cannot_write(self._path, "record_dir", error) from None

    def append(self, metrics: IterationMetrics) -> None:
        """Write the line of one iteration.

        Raises:
            ConfigurationError: The file cannot be written, for example because the disk is full. The file is
                unchanged.
        """
        text = json.dumps(without_nan(dataclasses.asdict(metrics)), allow_nan=False) + "\n"
        line = memoryview(text.encode())
        end = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(end)
            raise cannot_write(self._path, "record_dir", error) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class LoadsWriter:
    """Collects router counts and keeps ``loads.npz`` up to date. The file is always complete.

    The counts of the whole run stay in memory (I·L·D·E·4 bytes). The file is written at intervals, which
    takes at most about 5 % of the time, and on :meth:`close`.
    """

    def __init__(self, record_dir: Path | str, layers: Sequence[int]) -> None:
        """Open the file. New entries are added to existing ones.

        Args:
            record_dir: Folder of the run.
            layers: Megatron's number of each recorded layer, in order.
        """
        path = Path(record_dir) / LOADS_FILE
        found = None
        if path.exists():
            read = vars(read_loads(record_dir))
            found = {name: array for name, array in read.items() if array is not None}
        self._num_layers = len(layers)
        self._arrays = GrowingArrays(path, np.asarray(layers, dtype=np.int64), found)

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

    def write(self) -> None:
        """Write the file now.

        Raises:
            ConfigurationError: The file cannot be written. The old file is unchanged.
        """
        self._arrays.write()

    def close(self) -> None:
        """Write the entries that are not yet in the file."""
        self._arrays.close()


def parse_metrics_line(line: str) -> IterationMetrics:
    """Read one line of ``metrics.jsonl``.

    Args:
        line: JSON object of one iteration.

    Returns:
        The metrics of the iteration. Unknown keys are ignored. Missing keys, which earlier versions did not
        write, get their default values.

    Raises:
        ValueError: The line is not the record of an iteration.
    """
    try:
        return parse_record(IterationMetrics, line)
    except ValueError as error:
        raise ValueError(f"not an iteration record: {error}") from None


def read_metrics(record_dir: Path | str) -> list[IterationMetrics]:
    """Read ``metrics.jsonl`` of a run, in the order of iterations.

    Args:
        record_dir: Folder of the run.

    Raises:
        ConfigurationError: The file is missing or a line is damaged.
    """
    path = Path(record_dir) / METRICS_FILE
    records: list[IterationMetrics] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = parse_metrics_line(line)
        except ValueError as error:
            raise ConfigurationError(
                f"{path}: line {number} is damaged or incomplete ({error}); if the run is still training, "
                "try again; otherwise delete this line or record the run again"
            ) from None
        while records and records[-1].iteration >= record.iteration:
            records.pop()
        records.append(record)
    return records


def read_loads(record_dir: Path | str) -> RecordedLoads:
    """Read ``loads.npz`` of a run, without pickle.

    Args:
        record_dir: Folder of the run.

    Raises:
        ConfigurationError: The file is missing or damaged, or does not hold loads.
    """
    path = Path(record_dir) / LOADS_FILE
    formats = {
        _COUNTS: ArrayFormat(np.int32, 4),
        _BY_NODES: ArrayFormat(np.int64, 3),
        _BY_DEVICES: ArrayFormat(np.int64, 3),
    }
    arrays = read_arrays(path, formats, optional=(_BY_NODES, _BY_DEVICES))
    try:
        return RecordedLoads(**arrays)
    except ValueError as error:
        raise unreadable(path, error) from None


def _cut_half_written_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def without_nan(value: Any) -> Any:
    """Return plain values with None in place of every number that JSON does not support (NaN, infinity)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return value
