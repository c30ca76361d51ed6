"""All settings of one training run, as one YAML file holds them."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from megatron_fssdp.config.run.model_settings import ModelSettings
from megatron_fssdp.config.run.parallelism_settings import ParallelismSettings
from megatron_fssdp.config.run.training_settings import DataSettings, TrainingSettings
from megatron_fssdp.config.strategy.strategy_selection import strategy_settings
from megatron_fssdp.config.strategy.strategy_settings import StrategySettings

# Megatron's arguments for pipeline stages with different numbers of layers.
_UNEVEN_STAGES = frozenset(
    {
        "--pipeline-model-parallel-layout",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
    }
)


def _as_word(value: Any) -> Any:
    """Return a number as its text, as YAML users write ``[--num-workers, 2]``. Booleans are no words."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


_Word = Annotated[str, BeforeValidator(_as_word, json_schema_input_type=str | int | float)]


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

    model: ModelSettings = Field(description="Architecture of the model.")
    data: DataSettings = Field(default_factory=DataSettings, description="Training data and tokenizer.")
    parallelism: ParallelismSettings = Field(
        default_factory=ParallelismSettings, description="Number of ranks and parallel sizes."
    )
    training: TrainingSettings = Field(description="Batch sizes, optimizer, precision, logs and checkpoints.")
    strategy: StrategySection = Field(
        default_factory=StrategySection, description="MoE load-balancing strategy."
    )
    megatron_args: tuple[_Word, ...] = Field(
        default=(),
        description="Additional Megatron-LM arguments, passed unchanged, one word or number per item.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_model_fits_parallelism()
        self._check_experts()
        self._check_data()
        replicas = self.training.micro_batch_size * self.parallelism.data
        if self.training.global_batch_size % replicas:
            raise ValueError(
                f"training.global_batch_size {self.training.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.training.micro_batch_size} × data parallel size "
                f"{self.parallelism.data} = {replicas}; every rank processes whole micro-batches, so change "
                "one of the sizes"
            )
        if self.parallelism.context > 1 and self.model.family == "bert":
            raise ValueError(
                f"parallelism.context {self.parallelism.context}: Megatron's BERT has no context "
                "parallelism; set it to 1"
            )
        if self.parallelism.context > 1 and self.training.device == "cpu":
            raise ValueError(
                f"parallelism.context {self.parallelism.context} needs Transformer Engine's attention, which "
                "does not run on CPUs; set it to 1 or train on GPUs"
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
                    f"parallelism.tensor {cut.tensor} does not divide model.{key} {size}; every "
                    "tensor-parallel rank holds whole heads, so change one of the two"
                )
        chunks = cut.pipeline * (cut.virtual_pipeline or 1)
        if model.num_layers % chunks and not _UNEVEN_STAGES.intersection(self.megatron_args):
            raise ValueError(
                f"model.num_layers {model.num_layers} cannot be divided into {chunks} equal pipeline chunks "
                "(pipeline × virtual_pipeline); change one of these values, or describe unequal chunks in "
                "megatron_args, for example with --pipeline-model-parallel-layout"
            )
        if cut.sequence and model.seq_length % cut.tensor:
            raise ValueError(
                f"parallelism.tensor {cut.tensor} does not divide model.seq_length {model.seq_length}, as "
                "parallelism.sequence requires; change one of the two"
            )
        if cut.context > 1 and model.seq_length % (2 * cut.context):
            raise ValueError(
                f"model.seq_length {model.seq_length} is not a multiple of 2 × parallelism.context "
                f"{cut.context}; change one of the two"
            )

    def _check_data(self) -> None:
        if self.data.external or self.data.path is not None:
            return  # the tokenizer of the data in a folder is checked when the folder is read
        has_sentences, wants_sentences = self.data.tokenizer == "wordpiece", self.model.family == "bert"
        if has_sentences != wants_sentences:
            raise ValueError(
                f"data.tokenizer {self.data.tokenizer} does not fit model.family {self.model.family}: "
                "bert trains on sentences in wordpiece, gpt trains on whole texts in bpe or bytes; set "
                f"data.tokenizer to {'wordpiece' if wants_sentences else 'bpe'}"
            )

    def _check_experts(self) -> None:
        model, cut, name = self.model, self.parallelism, self.strategy.name
        if model.num_experts is None:
            if cut.expert > 1 or name != "none":
                what = f"parallelism.expert {cut.expert}" if cut.expert > 1 else f"strategy '{name}'"
                raise ValueError(f"{what} needs an MoE model, but this model is dense; set model.num_experts")
            return
        if model.num_experts % cut.expert:
            raise ValueError(
                f"parallelism.expert {cut.expert} does not divide model.num_experts {model.num_experts}; "
                "every expert-parallel rank owns the same number of experts, so change one of the two"
            )
        if cut.expert_tensor > 1 and model.linear_bias:
            raise ValueError(
                f"parallelism.expert_tensor {cut.expert_tensor} and model.linear_bias exclude each other: "
                "Megatron has no biases in experts that are split over ranks; set linear_bias to false or "
                "expert_tensor to 1"
            )
        if cut.tensor > 1 and not cut.sequence and name == "none":
            raise ValueError(
                f"parallelism.tensor {cut.tensor} in an MoE model needs parallelism.sequence: true under "
                "strategy 'none', because Megatron trains MoE layers under tensor parallelism only with "
                "sequence parallelism; set it, or choose another strategy"
            )
