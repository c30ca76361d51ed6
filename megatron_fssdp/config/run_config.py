"""One YAML file for one training run."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_fssdp.config.model_settings import ModelSettings
from megatron_fssdp.config.parallelism_settings import ParallelismSettings
from megatron_fssdp.config.strategy_selection import strategy_settings
from megatron_fssdp.config.strategy_settings import StrategySettings
from megatron_fssdp.config.training_settings import DataSettings, TrainingSettings


class StrategySection(BaseModel):
    """Which MoE strategy runs, and its own keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="none", description="Name of the strategy.")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="The strategy's keys, as for --moe-strategy-set."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.resolve()
        return self

    def resolve(self) -> StrategySettings:
        """The settings as the strategy's own model."""
        return strategy_settings(self.name, self.settings, "strategy.settings")


class RunConfig(BaseModel):
    """A training run: model, data, parallelism, training and strategy."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="megatron-fssdp training run")

    model: ModelSettings = Field(description="The model.")
    data: DataSettings = Field(default_factory=DataSettings, description="What is trained on.")
    parallelism: ParallelismSettings = Field(
        default_factory=ParallelismSettings, description="How the model is cut over ranks."
    )
    training: TrainingSettings = Field(description="Schedule, precision, logs and checkpoints.")
    strategy: StrategySection = Field(
        default_factory=StrategySection, description="MoE load-balancing strategy."
    )
    megatron_args: tuple[str, ...] = Field(
        default=(), description="More Megatron-LM arguments, passed on as they are, one word each."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_model_fits_parallelism()
        self._check_experts()
        self._check_data()
        replicas = self.training.micro_batch_size * self.parallelism.data
        if self.training.global_batch_size % replicas:
            raise ValueError(
                f"training.global_batch_size {self.training.global_batch_size} is no multiple of "
                f"micro_batch_size {self.training.micro_batch_size} × data parallel size "
                f"{self.parallelism.data} = {replicas}; every rank processes whole micro-batches"
            )
        if self.parallelism.context > 1 and self.model.family == "bert":
            raise ValueError(
                f"parallelism.context {self.parallelism.context}: Megatron's BERT has no context "
                "parallelism; set it to 1"
            )
        if self.parallelism.context > 1 and self.training.device == "cpu":
            raise ValueError(
                f"parallelism.context {self.parallelism.context} needs Transformer Engine's attention, which "
                "has no CPU form; set it to 1 or train on GPUs"
            )
        return self

    def _check_model_fits_parallelism(self) -> None:
        model, cut = self.model, self.parallelism
        for key, size in (
            ("num_attention_heads", model.num_attention_heads),
            ("num_query_groups", model.num_query_groups or cut.tensor),
        ):
            if size % cut.tensor:
                raise ValueError(
                    f"parallelism.tensor {cut.tensor} does not divide model.{key} {size}; tensor ranks hold "
                    "whole heads"
                )
        chunks = cut.pipeline * (cut.virtual_pipeline or 1)
        if model.num_layers % chunks:
            raise ValueError(
                f"model.num_layers {model.num_layers} cannot be cut into {chunks} equal pipeline chunks "
                "(pipeline × virtual_pipeline)"
            )
        if cut.sequence and model.seq_length % cut.tensor:
            raise ValueError(
                f"parallelism.tensor {cut.tensor} does not divide model.seq_length {model.seq_length}, which "
                "parallelism.sequence cuts"
            )
        if cut.context > 1 and model.seq_length % (2 * cut.context):
            raise ValueError(
                f"model.seq_length {model.seq_length} is no multiple of 2 × parallelism.context {cut.context}"
            )

    def _check_data(self) -> None:
        if self.data.external or self.data.path is not None:
            return  # what is in the folder is checked where it is read
        has_sentences, wants_sentences = self.data.tokenizer == "wordpiece", self.model.family == "bert"
        if has_sentences != wants_sentences:
            raise ValueError(
                f"data.tokenizer {self.data.tokenizer} does not go with model.family {self.model.family}: "
                "bert trains on sentences in wordpiece, gpt on whole texts in bpe or bytes; set "
                f"data.tokenizer to {'wordpiece' if wants_sentences else 'bpe'}"
            )

    def _check_experts(self) -> None:
        model, cut, name = self.model, self.parallelism, self.strategy.name
        if model.num_experts is None:
            if cut.expert > 1 or name != "none":
                what = f"parallelism.expert {cut.expert}" if cut.expert > 1 else f"strategy '{name}'"
                raise ValueError(f"{what} needs an MoE model; set model.num_experts")
            return
        if model.num_experts % cut.expert:
            raise ValueError(
                f"parallelism.expert {cut.expert} does not divide model.num_experts {model.num_experts}; "
                "every expert parallel rank owns equally many experts"
            )
        if cut.expert_tensor > 1 and model.linear_bias:
            raise ValueError(
                f"parallelism.expert_tensor {cut.expert_tensor} and model.linear_bias exclude each other: "
                "Megatron has no biases in cut experts; set linear_bias to false or expert_tensor to 1"
            )
        if cut.tensor > 1 and not cut.sequence and name == "none":
            raise ValueError(
                f"parallelism.tensor {cut.tensor} in an MoE model needs parallelism.sequence: true; Megatron "
                "trains MoE layers under tensor parallelism only with sequence parallelism, every other "
                "strategy also without"
            )
