"""All settings of one training run, as one YAML file holds them."""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_fssdp.config.run import megatron_options
from megatron_fssdp.config.run.sections import (
    DataSettings,
    ModelArguments,
    ParallelismArguments,
    Section,
    TrainingArguments,
    refuse,
)
from megatron_fssdp.config.strategy.strategy_selection import strategy_settings
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings

SECTIONS: Mapping[str, type[Section]] = {
    "model": ModelArguments,
    "parallelism": ParallelismArguments,
    "training": TrainingArguments,
}
"""Sections with arguments of Megatron, and the models of their keys."""

# Megatron's arguments for pipeline stages with different numbers of layers.
_UNEVEN_STAGES = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_per_virtual_pipeline_stage",
)


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
        """Yield the path and the problem of every key that no section declares and Megatron refuses.

        Args:
            data: Plain values of a run.
        """
        found: dict[str, str] = {}
        for section, model in SECTIONS.items():
            values = data.get(section)
            for key, value in values.items() if isinstance(values, Mapping) else ():
                home = [name for name, other in SECTIONS.items() if key in other.model_fields]
                if section in home:
                    continue
                if home:
                    yield (section, key), f"unknown key '{key}'; it belongs under {home[0]}"
                elif key in found:
                    yield (section, key), f"unknown key '{key}'; it is given under {found[key]}, too"
                elif key not in megatron_options.options():
                    yield (
                        (section, key),
                        megatron_options.unknown_option(key, list(model.model_fields), model.own_keys()),
                    )
                elif problem := megatron_options.problem(key, value):
                    yield (section, key), problem
                found[key] = section

    def megatron_values(self) -> dict[str, Any]:
        """Return the arguments of Megatron that this run gives, by name. None: without a value."""
        sections = (self.model, self.parallelism, self.training)
        return {key: value for section in sections for key, value in section.megatron_values().items()}

    @property
    def global_batch_size(self) -> int:
        """Number of samples of an iteration: by default one micro-batch on every data-parallel rank."""
        default = self.training.micro_batch_size * self.parallelism.data_parallel_size
        return self.training.global_batch_size or default

    @model_validator(mode="after")
    def _check(self) -> Self:
        model, cut, training, data = self.model, self.parallelism, self.training, self.data
        tensor, context = cut.tensor_model_parallel_size, cut.context_parallel_size
        chunks = cut.pipeline_model_parallel_size * (cut.num_virtual_stages_per_pipeline_rank or 1)
        is_uneven = any(self.megatron_values().get(name) is not None for name in _UNEVEN_STAGES)
        replicas = training.micro_batch_size * cut.data_parallel_size
        of_sentences, wanted = data.tokenizer == "wordpiece", model.family == "bert"
        for key, size in (
            ("num_attention_heads", model.num_attention_heads),
            ("num_query_groups", model.num_key_heads if model.group_query_attention else tensor),
        ):
            if size % tensor:
                raise ValueError(
                    f"parallelism.tensor_model_parallel_size {tensor} does not divide model.{key} {size}; "
                    "every tensor-parallel rank holds whole heads, so change one of the two"
                )
        refuse(
            (
                model.num_layers % chunks and not is_uneven,
                f"model.num_layers {model.num_layers} cannot be divided into {chunks} equal pipeline chunks "
                "(pipeline_model_parallel_size × num_virtual_stages_per_pipeline_rank); change one of these "
                "values, or describe unequal chunks, for example with pipeline_model_parallel_layout",
            ),
            (
                cut.sequence_parallel and model.seq_length % tensor,
                f"parallelism.tensor_model_parallel_size {tensor} does not divide model.seq_length "
                f"{model.seq_length}, as parallelism.sequence_parallel requires; change one of the two",
            ),
            (
                context > 1 and model.seq_length % (2 * context),
                f"model.seq_length {model.seq_length} is not a multiple of 2 × "
                f"parallelism.context_parallel_size {context}; change one of the two",
            ),
        )
        self._check_experts()
        refuse(
            (
                # The tokenizer of the data in a folder is checked when the folder is read.
                of_sentences != wanted and not data.external and data.path is None,
                f"data.tokenizer {data.tokenizer} does not fit model.family {model.family}: bert trains on "
                "sentences in wordpiece, gpt trains on whole texts in bpe or bytes; set data.tokenizer to "
                f"{'wordpiece' if wanted else 'bpe'}",
            ),
            (
                self.global_batch_size % replicas,
                f"training.global_batch_size {training.global_batch_size} is not a multiple of "
                f"micro_batch_size {training.micro_batch_size} × data parallel size "
                f"{cut.data_parallel_size} = {replicas}; every rank processes whole micro-batches, so change "
                "one of the sizes",
            ),
            (
                context > 1 and model.family == "bert",
                f"parallelism.context_parallel_size {context}: Megatron's BERT has no context parallelism; "
                "set it to 1",
            ),
            (context > 1 and training.device == "cpu", no_context_on_cpu(context)),
        )
        return self

    def _check_experts(self) -> None:
        model, cut, name = self.model, self.parallelism, self.strategy.name
        experts = cut.expert_model_parallel_size
        if model.num_experts is None:
            what = (
                f"parallelism.expert_model_parallel_size {experts}" if experts > 1 else f"strategy '{name}'"
            )
            refuse(
                (
                    experts > 1 or name != "none",
                    f"{what} needs an MoE model, but this model is dense; set model.num_experts",
                )
            )
            return
        refuse(
            (
                model.num_experts % experts,
                f"parallelism.expert_model_parallel_size {experts} does not divide model.num_experts "
                f"{model.num_experts}; every expert-parallel rank owns the same number of experts, so change "
                "one of the two",
            ),
            (
                cut.expert_tensor_size > 1 and model.add_bias_linear,
                f"parallelism.expert_tensor_parallel_size {cut.expert_tensor_size} and model.add_bias_linear "
                "exclude each other: Megatron has no biases in experts that are split over ranks; set "
                "add_bias_linear to false or expert_tensor_parallel_size to 1",
            ),
            (
                cut.tensor_model_parallel_size > 1 and not cut.sequence_parallel and name == "none",
                f"parallelism.tensor_model_parallel_size {cut.tensor_model_parallel_size} in an MoE model "
                "needs parallelism.sequence_parallel: true under strategy 'none', because Megatron trains "
                "MoE layers under tensor parallelism only with sequence parallelism; set it, or choose "
                "another strategy",
            ),
        )


def no_context_on_cpu(size: int) -> str:
    """Return the refusal of context parallelism on CPU ranks."""
    return (
        f"parallelism.context_parallel_size {size} needs Transformer Engine's attention, which does not run "
        "on CPUs; set it to 1 or train on GPUs"
    )
