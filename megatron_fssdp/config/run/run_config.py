"""All settings of one training run, as one YAML file holds them."""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_fssdp.config.run import megatron_options, rules
from megatron_fssdp.config.run.sections import (
    DataSettings,
    ModelArguments,
    ParallelismArguments,
    Section,
    TrainingArguments,
)
from megatron_fssdp.config.strategy.strategy_selection import strategy_settings
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings

SECTIONS: Mapping[str, type[Section]] = {
    "model": ModelArguments,
    "parallelism": ParallelismArguments,
    "training": TrainingArguments,
}
"""Sections with arguments of Megatron, and the models of their keys."""


class StrategySection(BaseModel):
    """The MoE load-balancing strategy of a run and the strategy's own settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="none", description="Name of the strategy.")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="The strategy's own keys, as for --moe-strategy-set."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.resolve()
        return self

    def resolve(self) -> StrategySettings:
        """Return the settings as an instance of the strategy's own settings model."""
        return strategy_settings(self.name, self.settings, "strategy.settings")


class RunConfig(BaseModel):
    """Settings of a training run: model, data, parallelism, training and strategy."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="megatron-fssdp training run")

    model: ModelArguments = Field(description="Architecture of the model.")
    data: DataSettings = Field(default_factory=DataSettings, description="Training data and tokenizer.")
    parallelism: ParallelismArguments = Field(
        default_factory=ParallelismArguments, description="Number of ranks and parallel sizes."
    )
    training: TrainingArguments = Field(description="Batch sizes, optimizer, precision and outputs.")
    strategy: StrategySection = Field(
        default_factory=StrategySection, description="MoE load-balancing strategy."
    )

    @staticmethod
    def key_problems(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield path and problem of every key of a run that no section declares and Megatron refuses."""
        homes = {key: section for section, model in SECTIONS.items() for key in model.model_fields}
        for section, model in SECTIONS.items():
            values = data.get(section)
            for key, value in values.items() if isinstance(values, Mapping) else ():
                if key in model.model_fields:
                    continue
                if (home := homes.setdefault(key, section)) != section:
                    problem = f"unknown key '{key}'; it is under {home}"
                elif key not in megatron_options.options():
                    declared = list(model.model_fields)
                    problem = megatron_options.unknown_option(key, declared, model.own_keys())
                else:
                    problem = megatron_options.problem(key, value)
                if problem:
                    yield (section, key), problem

    def megatron_values(self) -> dict[str, Any]:
        """Return the arguments of Megatron that this run gives, by name. None: without a value."""
        sections = (self.model, self.parallelism, self.training)
        return {key: value for section in sections for key, value in section.megatron_values().items()}

    @property
    def vocab_size(self) -> int:
        """Number of token ids, without padding."""
        return int(self.megatron_values().get("vocab_size") or self.data.vocab_size)

    @property
    def global_batch_size(self) -> int:
        """Number of samples of an iteration: by default one micro-batch on every data-parallel rank."""
        default = self.training.micro_batch_size * self.parallelism.data_parallel_size
        return self.training.global_batch_size or default

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problem := next(rules.problems(self), ""):
            raise ValueError(problem)
        return self
