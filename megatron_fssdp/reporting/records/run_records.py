"""Reads and writes ``metrics.jsonl`` of a run: one line of metrics for each iteration.

A resumed run continues the same file. If it starts at an iteration that the file already holds, only its own
lines count from this iteration on.
"""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.json_records import Count, parse_record
from megatron_fssdp.config.written_files import cannot_write
from megatron_fssdp.reporting.records.arrays.array_files import unreadable
from megatron_fssdp.reporting.records.pass_metrics import PassMetrics
from megatron_fssdp.reporting.records.run_session import RunSession
from megatron_fssdp.reporting.records.selection_metrics import SelectionMetrics

METRICS_FILE = "metrics.jsonl"

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
        forward: Seconds of the parts of the forward passes. None if they were not measured.
        backward: Seconds of the parts of the backward passes. None if they were not measured.
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
    forward: PassMetrics | None = None
    backward: PassMetrics | None = None


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
        flops: Floating-point operations of the iteration over all devices, by Megatron's own formula, which
            counts those of the model and no recomputation. 0 if they were not recorded.
        session: The start of the training, in its first iteration. None in all others.
        selections: What ``auto`` selected before the iteration, one for each pipeline stage that reconsidered
            its strategies.
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
    flops: _Figure = 0.0
    session: RunSession | None = None
    selections: tuple[SelectionMetrics, ...] = ()


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


def parse_metrics_line(line: str) -> IterationMetrics:
    """Read one line of ``metrics.jsonl``.

    Args:
        line: JSON object of one iteration.

    Returns:
        The metrics of the iteration. Unknown keys are ignored, and missing keys get their default values.

    Raises:
        ValueError: The line is not the record of an iteration.
    """
    try:
        return parse_record(IterationMetrics, line)
    except ValueError as error:
        raise ValueError(f"not an iteration record: {error}") from None


def read_metrics(record_dir: Path | str) -> list[IterationMetrics]:
    """Read ``metrics.jsonl`` of a run, in the order of iterations. A half-written last line is ignored.

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
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_metrics_line(line)
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # the run was killed while it wrote this line, or is writing it now
            raise ConfigurationError(
                f"{path}: line {number} is damaged or incomplete ({error}); delete this line or record the "
                "run again"
            ) from None
        while records and records[-1].iteration >= record.iteration:
            records.pop()
        records.append(record)
    return records


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
