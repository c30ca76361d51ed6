"""The sections ``model``, ``data``, ``parallelism`` and ``training`` of a run's YAML.

All but ``data`` declare the arguments of Megatron that this package computes with, with Megatron's defaults.
Any other argument can stand beside them. The keys with a description are the package's own.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from megatron_fssdp.config.loading import Settings, setting

_Size = Annotated[int, Field(ge=1)]
_Positions = Literal["learned_absolute", "rope", "yarn", "mrope", "relative", "none"]


class Section(Settings):
    """A section with arguments of Megatron."""

    model_config = ConfigDict(extra="allow")


class ModelArguments(Section):
    """Architecture of a GPT or BERT model, dense or with mixture-of-experts layers."""

    family: Literal["gpt", "bert"] = setting(
        "gpt", "gpt predicts the next token. bert predicts masked words and the order of sentences."
    )
    bert_binary_head: bool = True
    num_layers: Annotated[int, Field(ge=1, le=10_000)]
    hidden_size: _Size
    ffn_hidden_size: _Size | None = None
    num_attention_heads: _Size
    group_query_attention: bool = False
    num_query_groups: _Size = 1
    kv_channels: _Size | None = None
    seq_length: Annotated[int, Field(ge=2)]
    position_embedding_type: _Positions = "learned_absolute"
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    swiglu: bool = False
    quick_geglu: bool = False
    add_bias_linear: bool = True
    untie_embeddings_and_output_weights: bool = False
    qk_layernorm: bool = False
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    window_size: tuple[int, int] | None = None
    window_attn_skip_freq: int | tuple[Literal[0, 1], ...] | None = None
    multi_latent_attention: bool = False
    q_lora_rank: _Size | None = None
    kv_lora_rank: _Size = 32
    qk_head_dim: _Size = 128
    qk_pos_emb_head_dim: Annotated[int, Field(ge=2)] = 64
    v_head_dim: _Size = 128
    num_experts: Annotated[int, Field(ge=2, le=100_000)] | None = None
    moe_layer_freq: _Size | tuple[Literal[0, 1], ...] = 1
    moe_ffn_hidden_size: _Size | None = None
    moe_shared_expert_intermediate_size: _Size | None = None
    moe_router_topk: _Size = 2
    moe_router_load_balancing_type: str | tuple[str, ...] = "aux_loss"
    moe_aux_loss_coeff: float | tuple[float, ...] = 0.0
    mtp_num_layers: Annotated[int, Field(ge=1, le=100)] | None = None

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def dense_ffn_size(self) -> int:
        """Inner width of a dense feed-forward layer, with Megatron's default."""
        default = int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.swiglu else 4 * self.hidden_size
        return self.ffn_hidden_size or default

    @property
    def expert_ffn_size(self) -> int:
        """Inner width of an expert."""
        return self.moe_ffn_hidden_size or self.dense_ffn_size

    @property
    def is_gated(self) -> bool:
        """Whether a feed-forward layer has two input matrices, where one product gates the other."""
        return self.swiglu or self.quick_geglu

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Whether each layer is an MoE layer: one boolean for each of the ``num_layers`` layers."""
        freq = self.moe_layer_freq
        marks = [layer % freq == 0 for layer in range(self.num_layers)] if isinstance(freq, int) else freq
        return tuple(self.num_experts is not None and bool(is_moe) for is_moe in marks)


class ParallelismArguments(Section):
    """Number of ranks and parallel sizes."""

    nproc_per_node: int = setting(1, "Number of ranks on each machine.", ge=1)
    num_nodes: int = setting(1, "Number of machines that torchrun spans.", ge=1)
    declared_nodes: int | None = setting(
        None,
        "Number of equal nodes that the placement strategies assume, in the order of the ranks, regardless "
        "of the real machines. Default: the nodes are detected.",
        ge=1,
    )
    tensor_model_parallel_size: _Size = 1
    pipeline_model_parallel_size: _Size = 1
    context_parallel_size: _Size = 1
    expert_model_parallel_size: _Size = 1
    expert_tensor_parallel_size: _Size | None = None
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.nproc_per_node * self.num_nodes

    @property
    def ranks_of_a_model(self) -> int:
        """Number of ranks that hold a model together: tensor × pipeline × context."""
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        return tensor * pipeline * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Ranks divided by the tensor, pipeline and context parallel sizes."""
        return self.world_size // self.ranks_of_a_model

    @property
    def expert_tensor_size(self) -> int:
        """Tensor parallel size of each expert, by default that of the model."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size


class DataSettings(Settings):
    """Training data and tokenizer."""

    path: Path | None = setting(
        None,
        "Folder written by `megatron-fssdp data build`. Default: the default corpus (the sources of Python's "
        "standard library), built once beside the output folder.",
    )
    tokenizer: Literal["bpe", "bytes", "wordpiece"] = setting(
        "bpe",
        "Tokenizer of the default corpus if path is not given. bert needs wordpiece, which uses only the "
        "sentences of docstrings and comments.",
    )
    vocab_size: int = setting(
        4096, "Vocabulary size of the default corpus's tokenizer, special tokens included.", ge=257
    )
    split: str = setting(
        "95,5,0",
        "Shares of the documents for training, validation and test. Without training.eval_interval, all "
        "documents are used for training.",
        pattern=r"^\d+(\.\d+)?(,\d+(\.\d+)?){0,2}$",
    )
    external: bool = setting(
        False,
        "Whether arguments of Megatron, such as training.data_path, name data and tokenizer. If true, path "
        "and tokenizer are ignored.",
    )


class TrainingArguments(Section):
    """Batch sizes, optimizer, precision, logs and checkpoints."""

    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Kind of devices. auto: CUDA devices if there are any, else CPUs."
    )
    transformer_engine: bool | None = setting(
        None,
        "Whether the machines with GPUs have Transformer Engine. Default: whether this machine has it; for "
        "commands that are printed on a machine without GPUs: true.",
    )
    save_checkpoints: bool = setting(
        True, "Whether the run writes checkpoints: into save, by default checkpoints in its folder."
    )
    tensorboard: bool = setting(
        False,
        "Whether Megatron writes TensorBoard events into the folder tensorboard in the output folder. "
        "tensorboard_dir names another folder.",
    )
    train_iters: _Size
    micro_batch_size: _Size = 1
    global_batch_size: _Size | None = None
    optimizer: str = "adam"
    lr: float = 1e-3
    lr_warmup_iters: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=0)] = 1234
    bf16: bool = False
    fp16: bool = False
    recompute_granularity: Literal["full", "selective"] | None = None
    eval_interval: _Size | None = None
    save: Path | None = None
    load: Path | None = None
    tensorboard_dir: Path | None = None
    profile: bool = False
    profile_step_start: Annotated[int, Field(ge=0)] = 10
    profile_step_end: _Size = 12

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """Data type of parameters and computation."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"
