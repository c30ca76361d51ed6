"""``metrics.jsonl`` of a run: what it says about an iteration.

It has one line of JSON for each of them. A killed run loses at most the line that it was writing. Of what a
resumed run repeats, only the repetition counts.
"""

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import to_json

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.files.json_records import Count, parse_record
from megatron_fssdp.files.written_files import cannot_write

METRICS_FILE = "metrics.jsonl"

_MOST_LINE_BYTES = 1 << 20  # of an iteration's line

# Limits of numbers in a record, which detect damaged records.
_Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Difference = Annotated[float, Field(allow_inf_nan=False)]

Loss = Annotated[float, BeforeValidator(lambda loss: math.nan if loss is None else loss)]
"""A loss. NaN, in JSON null, if it was not finite or not known."""


@dataclass(frozen=True)
class PassMetrics:
    """Seconds of the forward or backward passes of an MoE layer in an iteration, means over the ranks.

    Waits for replicas are not included. A recomputed forward pass counts as backward pass.
    """

    other_s: _Figure  # before the dispatch: attention, the gate, and shared experts that do not overlap
    dispatch_s: _Figure  # from the exchange of counts to sorted rows; the smart schedule's has the combine
    experts_s: _Figure  # the experts' compute
    combine_s: _Figure  # from the experts' results to the layer's output, with the wait for the slowest rank
    experts_slowest_s: _Figure  # the experts' compute on the rank where it takes longest


@dataclass(frozen=True)
class LayerMetrics:
    """Metrics of one MoE layer in one iteration."""

    layer: Count  # Megatron's number of the layer, from 1
    ep_load_max_over_mean: _Figure  # max/mean device load that plain expert parallelism would have had
    load_max_over_mean: _Figure  # max/mean device load under the placement that was used
    num_replicas: Count  # of all experts, in the micro-batch that has most of them
    spag_bytes: Count  # that SparseAllGather moved, over all devices
    sprs_bytes: Count  # that SparseReduceScatter moved, over all devices
    cross_node_tokens: Count  # dispatched tokens whose expert was on another node
    # Transfers on device 0 of each expert-parallel group, means over the groups; exposed: compute waited.
    spag_s: _Figure = 0.0
    spag_exposed_s: _Figure = 0.0
    sprs_s: _Figure = 0.0
    sprs_exposed_s: _Figure = 0.0
    # Share of the load on the same experts as one iteration before (Pro-Prophet's locality). None at first.
    load_similarity: _Figure | None = None
    # Standard deviation of device loads under plain expert parallelism over that under the placement used
    # (Pro-Prophet's RB). None if the latter is 0.
    balance_ratio: _Figure | None = None
    schedule: str | None = None  # order of the collectives in the last forward pass (Parm's schedules)
    schedule_predicted_s: dict[str, _Figure] | None = None  # of a forward pass, by compared schedule
    strategy: str | None = None  # that ``auto`` selected for the layer; None under other strategies
    forward: PassMetrics | None = None  # None if the parts of the passes were not measured
    backward: PassMetrics | None = None


@dataclass(frozen=True)
class RunSession:
    """One start of a training."""

    strategy: str
    iterations: Count  # that the run was asked to train, those before its start included
    ranks: Count = 0  # on the host that has the fewest cores per rank
    cores: Count = 0  # that these ranks can use; 0 if ranks compute on GPUs
    devices: Count = 0  # ranks of the whole run, each with a device of its own; 0: not recorded
    device: str = ""  # name of the GPU of global rank 0; empty if ranks compute on CPUs
    precision: str = ""  # data type of parameters and compute: fp32, bf16 or fp16; empty if not recorded

    @property
    def shared_cores(self) -> str:
        """Statement such as ``4 ranks share 2 cores``, or nothing.

        Ranks with little work then lend their cores to busy ones, so balance saves no time.
        """
        if not 0 < self.cores < self.ranks:
            return ""
        return f"{self.ranks} ranks share {self.cores} core{'s' if self.cores > 1 else ''}"


@dataclass(frozen=True)
class SelectionMetrics:
    """One selection of ``auto`` for the layers of a pipeline stage, before an iteration."""

    stage: Count  # from 0
    changed: tuple[Count, ...]  # Megatron's numbers of the layers that got another strategy, in order
    predicted_s: _Difference  # modelled seconds that these changes save in an iteration


@dataclass(frozen=True)
class IterationMetrics:
    """Metrics of one training iteration."""

    iteration: Count  # from 1
    lm_loss: Loss
    grad_norm: _Figure | None  # global; None if Megatron did not compute it
    iteration_s: _Figure  # wall-clock time
    tokens_per_s: _Figure  # of the global batch
    layers: tuple[LayerMetrics, ...] = ()  # of the MoE layers, in order
    resharded_experts: Count = 0  # experts whose owner or slot changed before the iteration
    reshard_bytes: Count = 0  # that the re-shard moved between devices, over all devices
    reshard_s: _Figure = 0.0  # part of ``iteration_s``, on device 0 of the slowest group
    passes_s: _Figure = 0.0  # part of it in passes and reduction of gradients, on rank 0; 0: not recorded
    rank_peak_bytes: tuple[Count, ...] = ()  # peak memory of each global rank so far; empty: not recorded
    rank_memory: str | None = None  # ``allocated`` by torch on the GPU, or ``resident`` in the host's memory
    flops: _Figure = 0.0  # of all devices without recomputation, by Megatron's formula; 0: not recorded
    session: RunSession | None = None  # the start of the training, in its first iteration; else None
    selections: tuple[SelectionMetrics, ...] = ()  # of ``auto`` before the iteration, one for each stage


class MetricsWriter:
    """Appends one :class:`IterationMetrics` for each iteration. A resumed run continues the file.

    The first iteration that is appended drops its own lines and those of later iterations. If the file cannot
    be written, a ConfigurationError says so, also at once.
    """

    def __init__(self, record_dir: Path | str) -> None:
        self._path, self._has_begun = Path(record_dir) / METRICS_FILE, False
        self._add()

    def append(self, record: IterationMetrics) -> None:
        """Write an iteration as one line."""
        if not self._has_begun:
            with suppress(OSError):  # read_metrics ignores what is repeated, so the run goes on
                _drop_from(self._path, record.iteration)
        self._has_begun = True
        self._add(record)

    def _add(self, *records: IterationMetrics) -> None:
        """Add lines, after a half-written last line is cut."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+b") as file:
                if end := file.tell():
                    file.seek(end - 1)
                    if file.read() != b"\n":
                        file.truncate(self._path.read_bytes().rfind(b"\n") + 1)
                # JSON has no NaN and no infinity, so these become null.
                file.writelines(to_json(record, inf_nan_mode="null") + b"\n" for record in records)
        except OSError as error:
            raise cannot_write(self._path, "record_dir", error) from None


def _drop_from(path: Path, iteration: int) -> None:
    """Cut the file before its first line of this iteration or of a later one."""
    kept = 0
    for line in path.read_bytes().splitlines(keepends=True):
        with suppress(ValueError):  # damaged lines stay; commands report them
            if parse_record(IterationMetrics, line).iteration >= iteration:
                os.truncate(path, kept)
                return
        kept += len(line)


def read_metrics(record_dir: Path | str) -> list[IterationMetrics]:
    """Read the metrics of a run in the order of iterations, or raise a ConfigurationError."""
    path, records = Path(record_dir) / METRICS_FILE, list[IterationMetrics]()
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_record(IterationMetrics, line)
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


def last_metrics(path: Path) -> IterationMetrics | None:
    """Read the last complete line of a ``metrics.jsonl`` while a run appends to it; None without one."""
    with suppress(FileNotFoundError, ValueError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_LINE_BYTES))
        content = file.read()
        lines = content[: content.rfind(b"\n") + 1].splitlines()
        return parse_record(IterationMetrics, lines[-1]) if lines else None
    return None


def unreadable(path: Path, error: Exception) -> ConfigurationError:
    """Return the error to raise after that which reading a record raised."""
    if isinstance(error, FileNotFoundError):
        return ConfigurationError(f"{path}: no such file; give the folder of a run that recorded its loads")
    if isinstance(error, NotADirectoryError):
        return ConfigurationError(f"{path.parent}: is a file, wanted the folder of a run")
    if isinstance(error, PermissionError):
        return ConfigurationError(f"{path}: permission denied; let your user read it, or give another")
    reason = shorten(str(error) or type(error).__name__, 100, placeholder=" …")
    return ConfigurationError(
        f"{path}: damaged, incomplete or not a record of a run ({reason}); record the run again"
    )
