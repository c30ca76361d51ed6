"""Reads the records of a finished or running run from its folder and computes summary figures."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import load_yaml, validate
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.reporting.records.evaluations import Evaluation, read_evaluations
from megatron_fssdp.reporting.records.run_records import IterationMetrics, read_metrics


@dataclass(frozen=True)
class RecordedRun:
    """The records of one run.

    Shape letters: I iterations, L MoE layers.

    Attributes:
        path: Folder of the run.
        strategy: Name of the run's strategy, or the folder's name if the strategy is unknown.
        metrics: Metrics of at least one iteration, in order.
        asked_iterations: Number of the last iteration that the run was asked to train, or None if unknown.
        evaluations: Losses on validation and test data, in the order of iterations.
    """

    path: Path
    strategy: str
    metrics: tuple[IterationMetrics, ...]
    asked_iterations: int | None = None
    evaluations: tuple[Evaluation, ...] = ()

    @cached_property
    def iterations(self) -> NDArray[np.int64]:
        """Iteration numbers, int64 ``[I]``."""
        return np.array([record.iteration for record in self.metrics])

    @cached_property
    def layers(self) -> list[int]:
        """Megatron's numbers of the MoE layers, of length L. The list is empty under strategy ``none``."""
        return [layer.layer for layer in self.metrics[0].layers]

    @cached_property
    def load_IL(self) -> NDArray[np.float64]:
        """Max/mean device load under the placement that was used, float64 ``[I, L]``."""
        return np.array(
            [[layer.load_max_over_mean for layer in record.layers] for record in self.metrics],
            dtype=np.float64,
        )

    @cached_property
    def losses(self) -> NDArray[np.float64]:
        """Language-model losses, float64 ``[I]``."""
        return np.array([record.lm_loss for record in self.metrics])

    def last_loss_on(self, data: str) -> Evaluation | None:
        """Return the last evaluation on some data, or None if there was none.

        Args:
            data: ``validation`` or ``test``.
        """
        return next((one for one in reversed(self.evaluations) if one.data.startswith(data)), None)

    @property
    def shared_cores(self) -> str:
        """Statement that ranks shared cores (``RunSession.shared_cores``). Empty if they did not."""
        sessions = [record.session for record in self.metrics if record.session is not None]
        return next((session.shared_cores for session in sessions if session.shared_cores), "")

    def total(self, field: str) -> float:
        """Return the sum of a layer metric over layers and iterations.

        Args:
            field: Name of a field of ``LayerMetrics``.
        """
        return sum(getattr(layer, field) for record in self.metrics for layer in record.layers)

    def median(self, field: str) -> float | None:
        """Return the median of a layer metric over the entries that have it, or None if no entry has it.

        Args:
            field: Name of a field of ``LayerMetrics``.
        """
        known = [getattr(layer, field) for record in self.metrics for layer in record.layers]
        known = [value for value in known if value is not None]
        return float(np.median(known)) if known else None

    def hidden_share(self, transfer: Literal["spag", "sprs"]) -> float | None:
        """Return the share of a transfer's seconds that was hidden under compute, or None without transfers.

        Args:
            transfer: ``spag`` for weights or ``sprs`` for gradients.
        """
        busy_s = self.total(f"{transfer}_s")
        return 1 - self.total(f"{transfer}_exposed_s") / busy_s if busy_s else None

    @property
    def reshards(self) -> list[IterationMetrics]:
        """Metrics of the iterations before which experts moved to new owners."""
        return [record for record in self.metrics if record.resharded_experts]


def read_run(path: Path) -> RecordedRun:
    """Read the records in a run's folder.

    Args:
        path: Folder that ``megatron-fssdp train --out`` wrote, or any ``record_dir``.

    Returns:
        The records of the run.

    Raises:
        ConfigurationError: The folder holds no records, records of different models, or a damaged
            ``config.yaml``.
    """
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
    evaluations = read_evaluations(path)
    config = path / "config.yaml"
    if not config.exists():  # the command line did not start this run's script
        name = path.resolve().name if session is None else session.strategy
        asked = None if session is None else session.iterations
        return RecordedRun(path, name, tuple(metrics), asked, evaluations)
    settings = load_yaml(config)
    training = settings.get("training")
    asked = training.get("train_iters") if isinstance(training, dict) else None
    if session is not None:
        asked = session.iterations
    return RecordedRun(
        path,
        _strategy_of(settings, config),
        tuple(metrics),
        asked if isinstance(asked, int) else None,
        evaluations,
    )


def _strategy_of(settings: dict[str, Any], config: Path) -> str:
    section = settings.get("strategy")
    name = section.get("name") if isinstance(section, dict) else None
    if not isinstance(name, str):
        raise ConfigurationError(
            f"{config}: names no strategy, so the file is damaged or incomplete; record the run again"
        )
    return name


def run_config_of(path: Path) -> RunConfig:
    """Return the settings that a run was started with.

    Args:
        path: Folder of the run.

    Raises:
        ConfigurationError: The folder has no ``config.yaml``, or the file is damaged.
    """
    config = path / "config.yaml"
    return validate(RunConfig, load_yaml(config), str(config))


def distinct_names(*runs: RecordedRun) -> list[str]:
    """Return a different name for each run: its strategy, its folder's name, or its whole path."""
    names = [run.strategy for run in runs]
    for candidates in (names, [run.path.resolve().name for run in runs]):
        if len(set(candidates)) == len(runs):
            return candidates
    return [str(run.path) for run in runs]


def loss_differences(
    first: RecordedRun, second: RecordedRun
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Compare the losses a and b of two runs.

    Returns:
        The numbers of the iterations that both runs have, int64 ``[I]``, and the relative difference
        ``|a - b| / |a|`` of the losses in these iterations, float64 ``[I]``.
    """
    common, at_first, at_second = np.intersect1d(first.iterations, second.iterations, return_indices=True)
    one, other = first.losses[at_first], second.losses[at_second]
    return common, np.abs(one - other) / np.maximum(np.abs(one), np.finfo(np.float64).tiny)
