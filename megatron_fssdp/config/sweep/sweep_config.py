"""The YAML of a sweep: strategies × settings × seeds × repetitions of one run."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_fssdp.config.loading import load_yaml, validate
from megatron_fssdp.config.run.json_schema import choose_strategy_settings
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES

_OWN_KEYS = {
    "strategy": "list strategies and their settings under strategies",
    "training.seed": "list seeds under seeds",
    "training.train_iters": "give the number under iterations",
    "training.save": "every run keeps its checkpoints in its own folder",
}
"""Settings that a sweep gives in another place, by their dotted key."""

_Key = Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")]
_Values = Annotated[tuple[Any, ...], Field(min_length=1)]


class SweptStrategy(BaseModel):
    """A strategy of a sweep, with settings of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Name of the strategy.")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="The strategy's own keys, as for --moe-strategy-set."
    )
    label: str | None = Field(
        default=None,
        pattern=r"^[\w.+=-]+$",
        description="Name in folders and on the page, if a strategy is listed twice. Default: its name.",
    )


class SweepConfig(BaseModel):
    """A sweep: every strategy with every combination of settings, every seed and every repetition."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="megatron-fssdp sweep")

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
    iterations: int | None = Field(
        default=None, ge=1, description="Number of iterations of every run. Default: the number in the files."
    )
    settings: dict[_Key, Any] = Field(
        default_factory=dict,
        description="Settings of all runs by dotted key, as for --set, such as training.lr: 1e-3.",
    )
    vary: dict[_Key, _Values] = Field(
        default_factory=dict,
        description="Settings that runs differ in: a list of values by dotted key. Every combination is run.",
    )
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(1,), min_length=1, description="Seeds of initial weights and order of data."
    )
    repetitions: int = Field(
        default=1,
        ge=1,
        description="Number of runs with the same settings and seed. Their losses are equal, and their times "
        "show how steady the machine is.",
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

    @property
    def swept_strategies(self) -> tuple[SweptStrategy, ...]:
        """All entries of ``strategies`` in the long form."""
        return tuple(SweptStrategy(name=one) if isinstance(one, str) else one for one in self.strategies)


def load_sweep(file: Path) -> SweepConfig:
    """Read the YAML of a sweep. Files of the run that lie beside it get the sweep's folder in their paths.

    Raises:
        ConfigurationError: The file cannot be read, or its settings are invalid.
    """
    sweep = validate(SweepConfig, load_yaml(file), str(file))
    beside = [file.parent / name for name in sweep.run]
    names = [str(path) if path.exists() else name for path, name in zip(beside, sweep.run, strict=True)]
    return sweep.model_copy(update={"run": tuple(names)})


def sweep_schema() -> dict[str, Any]:
    """Return the JSON Schema of a sweep's YAML."""
    schema = SweepConfig.model_json_schema()
    choose_strategy_settings(schema, "SweptStrategy")
    for choice in schema["properties"]["strategies"]["items"]["anyOf"]:
        if choice.get("type") == "string":
            choice["enum"] = list(STRATEGIES)
    return schema
