"""A finished or running run, read from its folder, and its figures."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import load_yaml, validate
from megatron_fssdp.config.renamed_settings import with_new_spellings
from megatron_fssdp.config.run_config import RunConfig
from megatron_fssdp.reporting.run_records import IterationMetrics, read_metrics


@dataclass(frozen=True)
class RecordedRun:
    """The records of one run. Shape letters: I iterations, L MoE layers.

    Attributes:
        path: The run's folder.
        strategy: Name of its strategy; the folder's name when it is not known.
        metrics: The iterations, in order; at least one.
    """

    path: Path
    strategy: str
    metrics: tuple[IterationMetrics, ...]

    @cached_property
    def iterations(self) -> NDArray[np.int64]:
        """Iteration numbers (I)."""
        return np.array([record.iteration for record in self.metrics])

    @cached_property
    def layers(self) -> list[int]:
        """Megatron's numbers of the MoE layers (L); none were recorded under strategy ``none``."""
        return [layer.layer for layer in self.metrics[0].layers]

    @cached_property
    def load_IL(self) -> NDArray[np.float64]:
        """Max over mean device load under the placement that was used (I, L)."""
        return np.array(
            [[layer.load_max_over_mean for layer in record.layers] for record in self.metrics],
            dtype=np.float64,
        )

    @cached_property
    def losses(self) -> NDArray[np.float64]:
        """Language-model losses (I)."""
        return np.array([record.lm_loss for record in self.metrics])

    @property
    def median_tokens_per_s(self) -> float:
        """Tokens a second in the middling iteration: the first ones warm up."""
        return float(np.median([record.tokens_per_s for record in self.metrics]))

    def total(self, field: str) -> float:
        """Sum of a layer metric over layers and iterations."""
        return sum(getattr(layer, field) for record in self.metrics for layer in record.layers)

    def median(self, field: str) -> float | None:
        """Median of a layer metric where it is known; ``None`` where it never is."""
        known = [getattr(layer, field) for record in self.metrics for layer in record.layers]
        known = [value for value in known if value is not None]
        return float(np.median(known)) if known else None

    def hidden_share(self, transfer: Literal["spag", "sprs"]) -> float | None:
        """Part of a transfer's seconds in which the recording ranks computed; ``None`` without transfers."""
        busy_s = self.total(f"{transfer}_s")
        return 1 - self.total(f"{transfer}_exposed_s") / busy_s if busy_s else None

    @property
    def reshards(self) -> list[IterationMetrics]:
        """The iterations before which experts moved."""
        return [record for record in self.metrics if record.resharded_experts]


def read_run(path: Path) -> RecordedRun:
    """Read a run's folder.

    Args:
        path: The folder that ``megatron-fssdp train --out`` wrote, or any ``record_dir``.

    Returns:
        The run.

    Raises:
        ConfigurationError: It holds no records, those of different models, or a damaged configuration.
    """
    metrics = read_metrics(path)
    if not metrics:
        raise ConfigurationError(f"{path}: the run has no finished iteration yet; wait, or give another run")
    layers = [layer.layer for layer in metrics[0].layers]
    if any([layer.layer for layer in record.layers] != layers for record in metrics):
        raise ConfigurationError(
            f"{path}: metrics.jsonl holds different MoE layers in different iterations, "
            "so of different models; record the run again"
        )
    return RecordedRun(path=path, strategy=_strategy_of(path), metrics=tuple(metrics))


def _strategy_of(path: Path) -> str:
    config = path / "config.yaml"
    if not config.exists():  # records of a script that the command line did not start
        return path.resolve().name
    section = load_yaml(config).get("strategy")
    name = section.get("name") if isinstance(section, dict) else None
    if not isinstance(name, str):
        raise ConfigurationError(
            f"{config}: names no strategy, so it is damaged or half written; record the run again"
        )
    return name


def run_config_of(path: Path) -> RunConfig:
    """The configuration that a run was started with.

    Raises:
        ConfigurationError: The folder has none, or a damaged one.
    """
    config = path / "config.yaml"
    return validate(RunConfig, with_new_spellings(load_yaml(config)), str(config))


def distinct_names(*runs: RecordedRun) -> list[str]:
    """What to call runs side by side: their strategies, or what is needed of their folders' names."""
    names = [run.strategy for run in runs]
    for candidates in (names, [run.path.resolve().name for run in runs]):
        if len(set(candidates)) == len(runs):
            return candidates
    return [str(run.path) for run in runs]


def loss_differences(
    first: RecordedRun, second: RecordedRun
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Common iterations of two runs, and ``|a - b| / |a|`` of their losses in these."""
    common, at_first, at_second = np.intersect1d(first.iterations, second.iterations, return_indices=True)
    one, other = first.losses[at_first], second.losses[at_second]
    return common, np.abs(one - other) / np.maximum(np.abs(one), np.finfo(np.float64).tiny)
