"""Settings of data and training: the ``data`` and ``training`` sections of a run's YAML."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DataSettings(BaseModel):
    """Training data and tokenizer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path | None = Field(
        default=None,
        description=(
            "Folder written by `megatron-fssdp data build`. Default: the default corpus (the sources of "
            "Python's standard library), built once beside the output folder."
        ),
    )
    tokenizer: Literal["bpe", "bytes", "wordpiece"] = Field(
        default="bpe",
        description=(
            "Tokenizer of the default corpus if path is not given. bert needs wordpiece, which uses only the "
            "sentences of docstrings and comments."
        ),
    )
    vocab_size: int = Field(
        default=4096,
        ge=257,
        description="Vocabulary size of the default corpus's tokenizer, special tokens included.",
    )
    split: str = Field(
        default="95,5,0",
        pattern=r"^\d+(\.\d+)?(,\d+(\.\d+)?){0,2}$",
        description=(
            "Shares of the documents for training, validation and test. Without training.eval_interval, all "
            "documents are used for training."
        ),
    )
    external: bool = Field(
        default=False,
        description="Whether megatron_args name data and tokenizer. If true, path and tokenizer are ignored.",
    )


class ProfileSettings(BaseModel):
    """Iterations that torch's profiler records."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: int = Field(ge=1, description="First profiled iteration, counted from 1.")
    end: int = Field(
        ge=1, description="Last profiled iteration. The run must train at least one iteration after it."
    )
    ranks: tuple[int, ...] = Field(
        default=(0,), min_length=1, description="Global ranks that write a trace of their own."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.end < self.start:
            raise ValueError(
                f"training.profile.end {self.end} is before training.profile.start {self.start}; raise end"
            )
        if min(self.ranks) < 0:
            raise ValueError(
                f"training.profile.ranks {list(self.ranks)}: wanted numbers of ranks, from 0; change them"
            )
        return self


class TrainingSettings(BaseModel):
    """Batch sizes, optimizer, precision, logs and checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    iterations: int = Field(ge=1, description="Number of training iterations (optimizer steps).")
    micro_batch_size: int = Field(
        default=1, ge=1, description="Number of samples that a rank processes at a time."
    )
    global_batch_size: int = Field(
        ge=1, description="Number of samples of one iteration, summed over all ranks."
    )
    optimizer: Literal["adam", "sgd"] = Field(default="adam", description="Optimizer.")
    lr: float = Field(default=1e-3, gt=0, description="Peak learning rate.")
    min_lr: float = Field(default=0.0, ge=0, description="Final learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = Field(
        default="cosine", description="Shape of the learning rate's decay over all iterations."
    )
    warmup_iterations: int = Field(
        default=0, ge=0, description="Number of iterations in which the learning rate rises linearly."
    )
    weight_decay: float = Field(default=0.01, ge=0, description="Weight decay of the optimizer.")
    clip_grad: float = Field(default=1.0, ge=0, description="Maximum norm of the gradient. 0: no clipping.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Adam's decay rate of the first moment.")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="Adam's decay rate of the second moment.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Kind of devices. auto: CUDA devices if there are any, else CPUs."
    )
    transformer_engine: bool | None = Field(
        default=None,
        description=(
            "Whether the machines with GPUs have Transformer Engine. Default: whether this machine has it; "
            "for commands that are printed on a machine without GPUs: true."
        ),
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="Data type of parameters and computation."
    )
    seed: int = Field(
        default=1234, ge=0, description="Seed of the initial weights and of the order of the data."
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none", description="Which activations the backward pass recomputes instead of storing."
    )
    log_interval: int = Field(
        default=10, ge=1, description="Number of iterations between Megatron's log lines."
    )
    tensorboard: bool | Path = Field(
        default=False,
        description=(
            "Whether Megatron writes TensorBoard events. true: into the folder tensorboard in the output "
            "folder. A path: into that folder."
        ),
    )
    profile: ProfileSettings | None = Field(
        default=None,
        description=(
            "Iterations that torch's profiler records into the folder torch_profile of the run, by flags of "
            "Megatron. A resumed run records none. Default: no profiler."
        ),
    )
    save_interval: int | None = Field(
        default=None,
        ge=1,
        description="Number of iterations between checkpoints. Default: one checkpoint at the end.",
    )
    save_checkpoints: bool = Field(default=True, description="Whether the run writes checkpoints.")
    checkpoint_dir: Path | None = Field(
        default=None,
        description="Folder of the checkpoints. Default: the folder checkpoints in the output folder.",
    )
    load_dir: Path | None = Field(
        default=None,
        description="Folder of a checkpoint to start from. Default: start with new weights.",
    )
    eval_interval: int | None = Field(
        default=None, ge=1, description="Number of iterations between evaluations. Default: no evaluations."
    )
    eval_iterations: int = Field(default=5, ge=1, description="Number of batches in one evaluation.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"training.micro_batch_size {self.micro_batch_size} does not divide "
                f"training.global_batch_size {self.global_batch_size}; change one of the two"
            )
        if self.warmup_iterations >= self.iterations:
            raise ValueError(
                f"training.warmup_iterations {self.warmup_iterations} must be smaller than "
                f"training.iterations {self.iterations}; lower it"
            )
        if self.profile is not None and self.profile.end >= self.iterations:
            # Megatron writes the traces when the iteration after the last profiled one begins.
            raise ValueError(
                f"training.profile.end {self.profile.end} must be smaller than training.iterations "
                f"{self.iterations}; lower it, or train longer"
            )
        if self.min_lr > self.lr:
            raise ValueError(
                f"training.min_lr {self.min_lr} is larger than training.lr {self.lr}; lower min_lr"
            )
        return self
