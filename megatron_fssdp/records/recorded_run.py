"""Reads everything that a finished or running training recorded in its folder.

Shape letters: I iterations, L MoE layers.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import load_yaml
from megatron_fssdp.records.loads import (
    LOADS_FILE,
    MICRO_BATCH_LOADS_FILE,
    MicroBatchLoads,
    RecordedLoads,
    read_loads,
    read_micro_batch_loads,
)
from megatron_fssdp.records.metrics import (
    IterationMetrics,
    LayerMetrics,
    PassMetrics,
    RunSession,
    read_metrics,
)
from megatron_fssdp.records.placements import PLACEMENTS_FILE, RecordedPlacements, read_placements
from megatron_fssdp.records.run_settings import SETTINGS_FILE, flat_settings

LOG_FILE = "log.txt"
_MEMORY_MARK = "[fssdp] memory of a rank: "
STOP_MARK = "[fssdp] stopped after iteration"
"""Begin of the line that the command line writes when the ranks end before the run is complete."""

_OF_ITERATIONS = (
    *("lm_loss", "grad_norm", "iteration_s", "tokens_per_s", "passes_s", "flops"),
    *("resharded_experts", "reshard_bytes", "reshard_s"),
)
_OF_LAYERS = tuple(
    field.name
    for field in fields(LayerMetrics)
    if field.name not in ("layer", "schedule", "schedule_predicted_s", "strategy", "forward", "backward")
)


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """The records of one run."""

    path: Path  # folder of the run
    strategy: str  # its name, or the folder's name if the strategy is unknown
    metrics: tuple[IterationMetrics, ...]  # of at least one iteration, in order
    session: RunSession | None  # the last start of the training that recorded itself
    asked_iterations: int | None  # number of the last iteration that the run was asked to train
    settings: dict[str, Any]  # content of ``config.yaml`` by dotted key; empty without this file
    loads: RecordedLoads | None  # None if they are not there, or damaged
    placements: RecordedPlacements | None
    micro_batch_loads: MicroBatchLoads | None
    expert_memory: str  # by the run's log; empty if it does not state this
    stops: tuple[str, ...]  # last iteration and reason of each early end: ``5: interrupted by Ctrl-C``
    problems: tuple[str, ...]  # one line for each file that is there but cannot be read

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """All recorded numbers by name, float64; NaN: not recorded.

        ``iterations`` int64 ``[I]`` and ``layers`` int64 ``[L]`` number the entries. Fields of
        :class:`IterationMetrics` end in ``_I``, such as ``lm_loss_I``, and those of :class:`LayerMetrics` in
        ``_IL``, such as ``spag_exposed_s_IL`` and ``forward_experts_s_IL``. Files of arrays have their own
        types, iterations and layers: ``loads.counts_ILDE``, ``loads.iterations``, ``placements.tokens_ILD``,
        ``micro_batch_loads.counts_IZLDE``.
        """
        arrays: dict[str, NDArray[Any]] = {
            "iterations": np.array([record.iteration for record in self.metrics]),
            "layers": np.array(self.layers, dtype=np.int64),
        }
        for name in _OF_ITERATIONS:
            arrays[f"{name}_I"] = np.array([getattr(record, name) for record in self.metrics], float)
        for name in _OF_LAYERS:
            numbers = [[getattr(layer, name) for layer in record.layers] for record in self.metrics]
            arrays[f"{name}_IL"] = np.array(numbers, float)
        for which in ("forward", "backward"):  # None where the parts of a layer's passes were not measured
            parts = [[getattr(layer, which) for layer in record.layers] for record in self.metrics]
            for field in fields(PassMetrics):
                seconds = [[getattr(part, field.name, None) for part in record] for record in parts]
                arrays[f"{which}_{field.name}_IL"] = np.array(seconds, float)
        for name in ("loads", "placements", "micro_batch_loads"):
            record = getattr(self, name)
            of_file = {} if record is None else vars(record)
            arrays |= {f"{name}.{array}": values for array, values in of_file.items() if values is not None}
        return arrays

    @property
    def iterations(self) -> NDArray[np.int64]:
        """Iteration numbers, int64 ``[I]``."""
        return self.arrays["iterations"]

    @property
    def layers(self) -> list[int]:
        """Megatron's numbers of the MoE layers; empty without them."""
        return [layer.layer for layer in self.metrics[0].layers]

    @property
    def losses(self) -> NDArray[np.float64]:
        """Language-model losses, float64 ``[I]``."""
        return self.arrays["lm_loss_I"]

    @property
    def load_IL(self) -> NDArray[np.float64]:
        """Max/mean device load under the placement that was used, float64 ``[I, L]``."""
        return self.arrays["load_max_over_mean_IL"]


def load(run: Path | str) -> RecordedRun:
    """Read the folder of a run, or any ``record_dir``. Damaged arrays are left out and named.

    No records, those of different models, or damaged settings are a ConfigurationError.
    """
    path = Path(run)
    metrics = read_metrics(path)
    if not metrics:
        raise ConfigurationError(f"{path}: the run has no finished iteration yet; wait, or give another run")
    layers = [layer.layer for layer in metrics[0].layers]
    if any([layer.layer for layer in record.layers] != layers for record in metrics):
        raise ConfigurationError(
            f"{path}: metrics.jsonl holds different MoE layers in different iterations, so it mixes "
            "different models; record the run again"
        )
    session = next((record.session for record in reversed(metrics) if record.session is not None), None)
    config, settings = path / SETTINGS_FILE, dict[str, Any]()
    name: Any = path.resolve().name if session is None else session.strategy
    if config.exists():  # otherwise, the command line did not start this run's script
        settings = flat_settings(load_yaml(config))
        name = settings.get("strategy.name")
        if not isinstance(name, str):
            raise ConfigurationError(
                f"{config}: names no strategy, so the file is damaged or incomplete; record the run again"
            )
    asked = settings.get("training.train_iters") if session is None else session.iterations
    problems: list[str] = []
    return RecordedRun(
        path,
        name,
        tuple(metrics),
        session,
        asked if isinstance(asked, int) else None,
        settings,
        _optional(path / LOADS_FILE, read_loads, problems),
        _optional(path / PLACEMENTS_FILE, read_placements, problems),
        _optional(path / MICRO_BATCH_LOADS_FILE, read_micro_batch_loads, problems),
        *_read_log(path / LOG_FILE),
        tuple(problems),
    )


def _optional[RecordT](path: Path, read: Callable[[Path], RecordT], problems: list[str]) -> RecordT | None:
    """Read a file if there is one, or note why it cannot be read."""
    try:
        return read(path.parent) if path.exists() else None
    except ConfigurationError as error:
        problems.append(f"{error}; everything that needs it is left out")
        return None


def _read_log(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return the statements of a run's log on memory and early ends."""
    memory, stops = "", []
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            # The last statement counts, because measured limits are known only after some iterations.
            _, stated, words = line.partition(_MEMORY_MARK)
            memory = words.strip() if stated else memory
            _, stopped, words = line.partition(STOP_MARK)
            stops += [words.strip()] if stopped else []
    return memory, tuple(stops)
