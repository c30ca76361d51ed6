"""The YAML of a sweep: strategies × settings × seeds × repetitions of one run, and the runs that it plans."""

import itertools
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import Settings, load_yaml, setting, validate

_OWN_KEYS = {
    "strategy": "list strategies and their settings under strategies",
    "training.seed": "list seeds under seeds",
    "training.train_iters": "give the number under iterations",
    "training.save": "every run keeps its checkpoints in its own folder",
}
"""Settings that a sweep gives in another place, by their dotted key."""

_MOST_CHARACTERS = 40
"""Length of a value in a folder's name. Together they stay far below the 255 bytes of common file systems."""

_Key = Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")]
_Values = Annotated[tuple[Any, ...], Field(min_length=1)]


class SweptStrategy(Settings):
    """A strategy of a sweep, with settings of its own."""

    name: str = Field(description="Name of the strategy.")
    settings: dict[str, Any] = setting({}, "The strategy's own keys, as for --moe-strategy-set.")
    label: str | None = setting(
        None,
        "Name in folders and on the page, if a strategy is listed twice. Default: its name.",
        pattern=r"^[\w.+=-]+$",
    )


class SweepConfig(Settings):
    """A sweep: every strategy with every combination of settings, every seed and every repetition."""

    model_config = ConfigDict(title="megatron-fssdp sweep")

    run: tuple[str, ...] = Field(
        min_length=1,
        description="YAML files of the run, relative to the folder of this file, or names that "
        "`megatron-fssdp configs` lists. Later files win.",
    )
    strategies: tuple[str | SweptStrategy, ...] = Field(
        min_length=1,
        description="Names of strategies, or mappings with name, settings and label. The page compares all "
        "with the first.",
    )
    iterations: int | None = setting(
        None, "Number of iterations of every run. Default: the number in the files.", ge=1
    )
    settings: dict[_Key, Any] = setting(
        {}, "Settings of all runs by dotted key, as for --set, such as training.lr: 1e-3."
    )
    vary: dict[_Key, _Values] = setting(
        {}, "Settings that runs differ in: a list of values by dotted key. Every combination is run."
    )
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = setting(
        (1,), "Seeds of initial weights and order of data.", min_length=1
    )
    repetitions: int = setting(
        1,
        "Number of runs with the same settings and seed. Their losses are equal, and their times show how "
        "steady the machine is.",
        ge=1,
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for section, settings in (("settings", self.settings), ("vary", self.vary)):
            for key in settings:
                for own, instead in _OWN_KEYS.items():
                    if f"{key}.".startswith(f"{own}."):
                        raise ValueError(f"{section}.{key}: cannot be given here; {instead}")
        if both := [key for key in self.vary if key in self.settings]:
            raise ValueError(f"vary.{both[0]}: is under settings, too; remove it from one of them")
        return self


def load_sweep(file: Path) -> SweepConfig:
    """Read the YAML of a sweep. Files of the run that lie beside it get the sweep's folder in their paths."""
    sweep = validate(SweepConfig, load_yaml(file), str(file))
    beside = ((name, file.parent / name) for name in sweep.run)
    run = tuple(str(path) if path.exists() else name for name, path in beside)
    return sweep.model_copy(update={"run": run})


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep, with ``key=value`` overrides of the strategy's and the run's settings.

    Its ``folder`` stays the same if the sweep grows. Runs of a ``group`` differ only in seed and repetition.
    """

    folder: str
    group: str
    strategy: str
    strategy_overrides: tuple[str, ...]
    overrides: tuple[str, ...]
    seed: int
    repetition: int


def planned_runs(sweep: SweepConfig) -> list[PlannedRun]:
    """Return all runs in order: strategies take turns, so that a machine that slows down slows them alike."""
    common = tuple(map(_override, sweep.settings, sweep.settings.values()))
    runs = [
        _run(strategy, dict(zip(sweep.vary, values, strict=True)), common, seed, repetition)
        for repetition in range(1, sweep.repetitions + 1)
        for seed in sweep.seeds
        for values in itertools.product(*sweep.vary.values())
        for strategy in sweep.strategies
    ]
    folder, count = Counter(run.folder for run in runs).most_common(1)[0]
    if count > 1:
        raise ConfigurationError(
            f"{count} runs have the same folder {folder}; remove what is listed twice under strategies, vary "
            "or seeds, or give a strategy another label"
        )
    return runs


def _run(
    strategy: str | SweptStrategy, varied: dict[str, Any], common: tuple[str, ...], seed: int, repetition: int
) -> PlannedRun:
    if isinstance(strategy, str):
        strategy = SweptStrategy(name=strategy)
    label = strategy.label or strategy.name
    last_parts = [key.rpartition(".")[2] for key in varied]  # keys with the same last part keep all parts
    words = [
        f"{last if last_parts.count(last) == 1 else key}={_plain(value)}"
        for last, (key, value) in zip(last_parts, varied.items(), strict=True)
    ]
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
    """Return ``key=value`` as options take it; JSON is YAML."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
