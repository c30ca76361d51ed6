"""All settings of one training run, as one YAML file holds them."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ConfigDict, Field, model_validator

from megatron_fssdp.config.loading import Problems, Settings
from megatron_fssdp.config.run import megatron_options, rules
from megatron_fssdp.config.run.sections import (
    DataSettings,
    ModelArguments,
    ParallelismArguments,
    Section,
    TrainingArguments,
)
from megatron_fssdp.config.strategy.strategy_registry import strategy_settings

SECTIONS: Mapping[str, type[Section]] = {
    "model": ModelArguments,
    "parallelism": ParallelismArguments,
    "training": TrainingArguments,
}
"""Sections with arguments of Megatron, and the models of their keys."""


class StrategySection(Settings):
    """The MoE load-balancing strategy of a run and the strategy's own settings."""

    name: str = Field(default="none", description="Name of the strategy.")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="The strategy's own keys, as for --moe-strategy-set."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        strategy_settings(self.name, self.settings, "strategy.settings")
        return self


class RunConfig(Settings):
    """Settings of a training run: model, data, parallelism, training and strategy."""

    model_config = ConfigDict(title="megatron-fssdp training run")

    model: ModelArguments = Field(description="Architecture of the model.")
    data: DataSettings = Field(default_factory=DataSettings, description="Training data and tokenizer.")
    parallelism: ParallelismArguments = Field(
        default_factory=ParallelismArguments, description="Number of ranks and parallel sizes."
    )
    training: TrainingArguments = Field(description="Batch sizes, optimizer, precision and outputs.")
    strategy: StrategySection = Field(
        default_factory=StrategySection, description="MoE load-balancing strategy."
    )

    @classmethod
    def key_problems(cls, data: Mapping[str, Any]) -> Problems:
        """Return what is wrong with keys that no section declares; Megatron's parser judges their values."""
        homes = {key: section for section, model in SECTIONS.items() for key in model.model_fields}
        problems: Problems = {}
        for section, model in SECTIONS.items():
            values = data.get(section)
            for key, value in values.items() if isinstance(values, Mapping) else ():
                if key in model.model_fields:
                    continue
                if (home := homes.setdefault(key, section)) != section:
                    text = f"unknown key '{key}'; it is under {home}"
                elif key in megatron_options.options():
                    text = megatron_options.problem(key, value)
                else:
                    text = megatron_options.unknown_option(key, list(model.model_fields), model.own_keys())
                if text:
                    problems[section, key] = text
        return problems

    def megatron_values(self) -> dict[str, Any]:
        """Return the arguments of Megatron that this run gives, by name. None: without a value."""
        return {
            name: value
            for section in (self.model, self.parallelism, self.training)
            for name, value in section
            if name in section.model_fields_set
            and name not in section.own_keys()
            and (value is not None or name not in type(section).model_fields)
        }

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
