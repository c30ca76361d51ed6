"""Data and schedule: the ``data`` and ``training`` sections of a run's YAML."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DataSettings(BaseModel):
    """What is trained on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path | None = Field(
        default=None,
        description=(
            "Folder made by `megatron-fssdp data build`. Default: the default corpus, built once beside the "
            "output folder."
        ),
    )
    tokenizer: Literal["bpe", "bytes", "wordpiece"] = Field(
        default="bpe",
        description=(
            "Tokenizer of the default corpus when path is not given. wordpiece, which bert needs, takes the "
            "sentences of its docstrings and comments."
        ),
    )
    vocab_size: int = Field(
        default=4096, ge=257, description="Vocabulary of that tokenizer, special tokens included."
    )
    split: str = Field(
        default="95,5,0",
        pattern=r"^\d+(\.\d+)?(,\d+(\.\d+)?){0,2}$",
        description=(
            "Shares of the documents for training, validation and test. Without training.eval_interval all "
            "are trained on."
        ),
    )
    external: bool = Field(
        default=False,
        description="Data and tokenizer are given in megatron_args instead; path and tokenizer are ignored.",
    )


class TrainingSettings(BaseModel):
    """Schedule, precision, logs and checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    iterations: int = Field(ge=1, description="Training iterations (optimizer steps).")
    micro_batch_size: int = Field(default=1, ge=1, description="Samples a rank processes at a time.")
    global_batch_size: int = Field(ge=1, description="Samples in an iteration, over all ranks.")
    optimizer: Literal["adam", "sgd"] = Field(default="adam", description="Optimizer.")
    lr: float = Field(default=1e-3, gt=0, description="Peak learning rate.")
    min_lr: float = Field(default=0.0, ge=0, description="Final learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = Field(
        default="cosine", description="Decay of the learning rate, over all iterations."
    )
    warmup_iterations: int = Field(default=0, ge=0, description="Iterations of linear warm-up.")
    weight_decay: float = Field(default=0.01, ge=0, description="Weight decay.")
    clip_grad: float = Field(default=1.0, ge=0, description="Limit of the gradient norm; 0 for none.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Adam's first decay rate.")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="Adam's second decay rate.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: CUDA where there is any, else CPU."
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(default="fp32", description="Precision.")
    seed: int = Field(default=1234, ge=0, description="Seed of weights and data order.")
    recompute: Literal["none", "selective", "full"] = Field(
        default="none", description="Activation recomputation."
    )
    log_interval: int = Field(default=10, ge=1, description="Iterations between Megatron's log lines.")
    tensorboard: bool | Path = Field(
        default=False,
        description=(
            "Whether Megatron writes TensorBoard events: true for the folder tensorboard in the output "
            "folder, or "
            "another folder."
        ),
    )
    save_interval: int | None = Field(
        default=None, ge=1, description="Iterations between checkpoints. Default: one at the end."
    )
    save_checkpoints: bool = Field(default=True, description="Write checkpoints at all.")
    checkpoint_dir: Path | None = Field(
        default=None, description="Folder of the checkpoints. Default: checkpoints in the output folder."
    )
    load_dir: Path | None = Field(
        default=None, description="Checkpoint folder to start from. Default: start fresh."
    )
    eval_interval: int | None = Field(
        default=None, ge=1, description="Iterations between evaluations. Default: never."
    )
    eval_iterations: int = Field(default=5, ge=1, description="Batches in an evaluation.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"training.micro_batch_size {self.micro_batch_size} does not divide "
                f"training.global_batch_size {self.global_batch_size}"
            )
        if self.warmup_iterations >= self.iterations:
            raise ValueError(
                f"training.warmup_iterations {self.warmup_iterations} leaves nothing of "
                f"training.iterations {self.iterations}; make it smaller"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"training.min_lr {self.min_lr} is larger than training.lr {self.lr}")
        return self
