"""Plans the runs of a sweep: their order, their folders, and the options that give each its settings."""

import itertools
import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.sweep.sweep_config import SweepConfig, SweptStrategy

_MOST_CHARACTERS = 40
"""Length of a value in a folder's name. Together they stay far below the 255 bytes of common file systems."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep: its strategy, and ``key=value`` overrides of the strategy's and the run's settings.

    The name of its ``folder`` stays the same if the sweep grows. Runs of a ``group`` differ only in seed and
    repetition (from 1).
    """

    folder: str
    group: str
    strategy: str
    strategy_overrides: tuple[str, ...]
    overrides: tuple[str, ...]
    seed: int
    repetition: int


def planned_runs(sweep: SweepConfig) -> list[PlannedRun]:
    """Return all runs of a sweep, in the order in which they are run.

    All strategies take turns: a machine that becomes slower during the sweep slows all of them, and an
    interrupted sweep has runs of every strategy.

    Raises:
        ConfigurationError: Two runs would have the same folder.
    """
    common = tuple(map(_override, sweep.settings, sweep.settings.values()))
    runs = [
        _run(strategy, dict(zip(sweep.vary, values, strict=True)), common, seed, repetition)
        for repetition in range(1, sweep.repetitions + 1)
        for seed in sweep.seeds
        for values in itertools.product(*sweep.vary.values())
        for strategy in sweep.swept_strategies
    ]
    folder, count = Counter(run.folder for run in runs).most_common(1)[0]
    if count > 1:
        raise ConfigurationError(
            f"{count} runs have the same folder {folder}; remove what is listed twice under strategies, vary "
            "or seeds, or give a strategy another label"
        )
    return runs


def _run(
    strategy: SweptStrategy, varied: dict[str, Any], common: tuple[str, ...], seed: int, repetition: int
) -> PlannedRun:
    label = strategy.label or strategy.name
    last = Counter(key.rpartition(".")[2] for key in varied)  # keys with the same last part keep all parts
    names = {key: key.rpartition(".")[2] for key in varied}
    words = [f"{name if last[name] == 1 else key}={_plain(varied[key])}" for key, name in names.items()]
    parts = [label, *(word[:_MOST_CHARACTERS] for word in words), f"seed{seed}"]
    parts += [f"repetition{repetition}"] if repetition > 1 else []
    return PlannedRun(
        folder=re.sub(r"[^\w.+=-]", "_", "-".join(parts)),
        group=" ".join([label, *words]),
        strategy=strategy.name,
        strategy_overrides=tuple(map(_override, strategy.settings, strategy.settings.values())),
        overrides=(*common, *map(_override, varied, varied.values()), f"training.seed={seed}"),
        seed=seed,
        repetition=repetition,
    )


def _override(key: str, value: Any) -> str:
    """Return ``key=value`` as options take it: they read the value as YAML, and JSON is YAML."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
