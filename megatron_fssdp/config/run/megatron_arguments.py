"""Translates a run's settings into Megatron-LM's command-line arguments."""

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.model_settings import ModelSettings
from megatron_fssdp.config.run.parallelism_settings import ParallelismSettings
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.run.training_settings import TrainingSettings
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES

# Megatron's fused kernels and Transformer Engine run on GPUs only.
_CPU_ARGUMENTS = (
    "--distributed-backend",
    "gloo",
    "--use-cpu-initialization",
    "--transformer-impl",
    "local",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-bias-swiglu-fusion",
    "--disable-jit-fuser",
    "--num-workers",
    "0",
)

_ACTIVATION_FLAGS: dict[str, list[str]] = {
    "gelu": [],
    "openai_gelu": ["--openai-gelu"],
    "squared_relu": ["--squared-relu"],
    "swiglu": ["--swiglu"],
    "quick_geglu": ["--quick-geglu"],
}


@dataclass(frozen=True)
class TokenizedData:
    """Location of tokenized data and the facts that Megatron needs about its tokenizer.

    Attributes:
        prefix: Path of the ``.bin`` and ``.idx`` files, without suffix.
        vocab_size: Number of token ids, end-of-document included.
        eod_id: Token id that ends a document.
        num_documents: Number of documents, or None if it is unknown. Whole documents are split into training,
            validation and test data.
        cache_dir: Folder for Megatron's index caches.
    """

    prefix: Path
    vocab_size: int
    eod_id: int
    num_documents: int | None
    cache_dir: Path


@dataclass(frozen=True)
class Installation:
    """Hardware and libraries that the ranks of a run have.

    Attributes:
        on_cpu: Whether the ranks run on CPUs and communicate over gloo.
        has_transformer_engine: Whether Transformer Engine can be imported.
    """

    on_cpu: bool
    has_transformer_engine: bool


def megatron_arguments(
    config: RunConfig, data: TokenizedData | None, installation: Installation, out_dir: Path, resume: bool
) -> list[str]:
    """Translate a run's settings into the arguments of a Megatron pretraining script.

    Args:
        config: Settings of the run.
        data: The tokenized training data. None if ``data.external`` is set and ``megatron_args`` names the
            data.
        installation: Hardware and libraries of the ranks.
        out_dir: Output folder of the run.
        resume: Whether the run continues from its own checkpoints.

    Returns:
        The arguments, strategy flags included. ``config.megatron_args`` come last and therefore win.

    Raises:
        ConfigurationError: The data has too few documents for its split.
    """
    return [
        *_model_arguments(config.model),
        *_moe_arguments(config.model),
        *_data_arguments(config, data),
        *_parallelism_arguments(config.parallelism, bool(config.model.num_experts)),
        *_training_arguments(config.training),
        *_board_arguments(config.training, out_dir),
        *_profile_arguments(config.training, out_dir, resume),
        *_checkpoint_arguments(config, out_dir, resume),
        *_device_arguments(config, installation),
        *strategy_arguments(config, out_dir),
        *config.megatron_args,
    ]


def strategy_arguments(config: RunConfig, out_dir: Path) -> list[str]:
    """Return the strategy's flags. Records go to the output folder unless the settings name another one."""
    settings = {"record_dir": str(out_dir), **config.strategy.settings}
    declared = config.parallelism.declared_nodes
    if declared is not None and "nodes" in STRATEGIES[config.strategy.name].settings.model_fields:
        settings.setdefault("nodes", declared)
    arguments = ["--moe-strategy", config.strategy.name]
    for key, value in settings.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        arguments += ["--moe-strategy-set", f"{key}={text}"]
    return arguments


def _model_arguments(model: ModelSettings) -> list[str]:
    arguments = _pairs(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        kv_channels=model.kv_channels,
        seq_length=model.seq_length,
        max_position_embeddings=model.seq_length,
        normalization=model.normalization,
        norm_epsilon=model.norm_epsilon,
        position_embedding_type=model.position_embedding,
        rotary_base=model.rotary_base if model.position_embedding == "rope" else None,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_std,
        activation_func_clamp_value=model.activation_clamp,
        glu_linear_offset=model.glu_linear_offset or None,
        softmax_type="learnable" if model.attention_sinks else None,
        window_size=f"{model.window_size - 1},0" if model.window_size is not None else None,
        window_attn_skip_freq=model.full_attention_freq,
        mtp_num_layers=model.mtp_num_layers,
        mtp_loss_scaling_factor=model.mtp_loss_scaling_factor if model.mtp_num_layers else None,
    )
    if model.multi_latent_attention:
        arguments += ["--multi-latent-attention", "--rope-type", "rope"]
        arguments += _pairs(
            q_lora_rank=model.q_lora_rank,
            kv_lora_rank=model.kv_lora_rank,
            qk_head_dim=model.qk_head_dim,
            qk_pos_emb_head_dim=model.qk_pos_emb_head_dim,
            v_head_dim=model.v_head_dim,
        )
    if model.num_query_groups is not None:
        arguments += ["--group-query-attention", *_pairs(num_query_groups=model.num_query_groups)]
    arguments += ["--qk-layernorm"] if model.qk_layernorm else []
    arguments += _ACTIVATION_FLAGS[model.activation]
    arguments += [] if model.linear_bias else ["--disable-bias-linear"]
    arguments += [] if model.tie_embeddings else ["--untie-embeddings-and-output-weights"]
    arguments += ["--bert-no-binary-head"] if model.family == "bert" and not model.order_head else []
    return arguments


def _moe_arguments(model: ModelSettings) -> list[str]:
    if model.num_experts is None:
        return []
    frequency = model.moe_layer_freq
    pre_softmax = model.moe_top_k == 1 if model.moe_pre_softmax is None else model.moe_pre_softmax
    arguments = _pairs(
        num_experts=model.num_experts,
        moe_router_topk=model.moe_top_k,
        moe_layer_freq=frequency if isinstance(frequency, int) else str(list(frequency)).replace(" ", ""),
        moe_ffn_hidden_size=model.moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=model.moe_shared_expert_size,
        moe_router_load_balancing_type=model.moe_balancing,
        moe_aux_loss_coeff=model.moe_aux_loss_coeff,
        moe_z_loss_coeff=model.moe_z_loss_coeff,
        moe_router_dtype=model.moe_router_dtype,
        moe_router_score_function=None if model.moe_score_function == "softmax" else model.moe_score_function,
        moe_router_num_groups=model.moe_num_groups,
        moe_router_group_topk=model.moe_group_top_k,
        moe_router_topk_scaling_factor=model.moe_scaling_factor,
        moe_router_bias_update_rate=model.moe_expert_bias_rate if model.moe_expert_bias else None,
        moe_token_dispatcher_type="alltoall",
    )
    arguments += ["--moe-router-enable-expert-bias"] if model.moe_expert_bias else []
    return arguments + (["--moe-router-pre-softmax"] if pre_softmax else [])


def _data_arguments(config: RunConfig, data: TokenizedData | None) -> list[str]:
    if data is None:
        return []
    # The data is already tokenized, so Megatron needs only the size of the vocabulary and the end-of-document
    # id, which text never contains. BERT's script also needs the vocabulary itself, because it masks whole
    # words.
    return _pairs(
        data_path=data.prefix,
        data_cache_path=data.cache_dir,
        split=_split(config, data),
        tokenizer_type="NullTokenizer",
        vocab_size=data.vocab_size,
        null_tokenizer_eod_id=data.eod_id,
        tokenizer_model=data.prefix.parent if config.model.family == "bert" else None,
    )


def _split(config: RunConfig, data: TokenizedData) -> str:
    if config.training.eval_interval is None:
        return "1,0,0"
    if data.num_documents is None:
        return config.data.split
    # If a part has no documents, Megatron searches it for tokens forever.
    shares = [float(share) for share in config.data.split.split(",")]
    total = sum(shares)
    for name, share in zip(("training", "validation", "test"), shares, strict=False):
        if (share > 0 or name == "training") and share / max(total, 1e-9) * data.num_documents < 1:
            raise ConfigurationError(
                f"data.split {config.data.split}: leaves none of the {data.num_documents} documents for the "
                f"{name} data; give it a larger share, or build the data from more files"
            )
    return config.data.split


def _parallelism_arguments(cut: ParallelismSettings, has_experts: bool) -> list[str]:
    arguments = _pairs(
        tensor_model_parallel_size=cut.tensor,
        pipeline_model_parallel_size=cut.pipeline,
        num_virtual_stages_per_pipeline_rank=cut.virtual_pipeline,
        context_parallel_size=cut.context,
    )
    if has_experts:
        arguments += _pairs(
            expert_model_parallel_size=cut.expert, expert_tensor_parallel_size=cut.expert_tensor
        )
    arguments += ["--sequence-parallel"] if cut.sequence else []
    arguments += ["--use-distributed-optimizer"] if cut.distributed_optimizer else []
    arguments += ["--overlap-grad-reduce"] if cut.overlap_grad_reduce else []
    arguments += ["--overlap-param-gather"] if cut.overlap_param_gather else []
    return arguments


def _training_arguments(training: TrainingSettings) -> list[str]:
    arguments = _pairs(
        train_iters=training.iterations,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        optimizer=training.optimizer,
        lr=training.lr,
        min_lr=training.min_lr,
        lr_decay_style=training.lr_schedule,
        lr_decay_iters=training.iterations,
        lr_warmup_iters=training.warmup_iterations,
        weight_decay=training.weight_decay,
        clip_grad=training.clip_grad,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        seed=training.seed,
        log_interval=training.log_interval,
        eval_iters=training.eval_iterations if training.eval_interval else 0,
        eval_interval=training.eval_interval or training.iterations,
    )
    if training.precision != "fp32":
        arguments.append(f"--{training.precision}")
    if training.recompute == "full":
        arguments += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        arguments += ["--recompute-num-layers", "1"]
    elif training.recompute == "selective":
        arguments += ["--recompute-granularity", "selective"]
    return arguments


def _board_arguments(training: TrainingSettings, out_dir: Path) -> list[str]:
    if training.tensorboard is False:
        return []
    return _pairs(
        tensorboard_dir=out_dir / "tensorboard" if training.tensorboard is True else training.tensorboard
    )


def trace_folder(training: TrainingSettings, out_dir: Path) -> Path:
    """Return the folder to which Megatron writes the profiler's traces: ``torch_profile`` beside the board.

    Args:
        training: Training settings of the run.
        out_dir: Output folder of the run.
    """
    board = training.tensorboard
    return (board.parent if isinstance(board, Path) else out_dir) / "torch_profile"


def _profile_arguments(training: TrainingSettings, out_dir: Path, resume: bool) -> list[str]:
    profile = training.profile
    if profile is None or resume:  # Megatron would count the iterations from the start of the resumed run.
        return []
    # Megatron's end is the iteration at which it writes the traces. It writes them beside the board's folder.
    steps = _pairs(profile_step_start=profile.start, profile_step_end=profile.end + 1)
    board = [] if training.tensorboard else _pairs(tensorboard_dir=out_dir / "tensorboard")
    ranks = ["--profile-ranks", *map(str, profile.ranks)]
    return ["--profile", "--use-pytorch-profiler", *steps, *ranks, *board]


def _checkpoint_arguments(config: RunConfig, out_dir: Path, resume: bool) -> list[str]:
    training = config.training
    own = training.checkpoint_dir or out_dir / "checkpoints"
    arguments: list[str] = []
    if training.save_checkpoints:
        arguments += _pairs(save=own, save_interval=training.save_interval or training.iterations)
        arguments += ["--ckpt-format", "torch_dist"]
        if config.parallelism.distributed_optimizer:
            # Megatron's default stores optimizer states by their position, and re-sharding changes positions.
            arguments.append("--dist-ckpt-optim-fully-reshardable")
    load = own if resume else training.load_dir
    if load is not None:
        # The learning-rate schedule follows this run's settings. With more iterations it differs from the
        # checkpoint's.
        arguments += [*_pairs(load=load), "--override-opt_param-scheduler"]
    return arguments


def _device_arguments(config: RunConfig, installation: Installation) -> list[str]:
    if installation.on_cpu:
        return list(_CPU_ARGUMENTS)
    arguments = ["--distributed-backend", "nccl", "--transformer-impl"]
    if not installation.has_transformer_engine:
        # These kernels are in Apex or in Transformer Engine; Megatron does not ask whether they exist.
        unfused = ["--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--no-rope-fusion"]
        return [*arguments, "local", *unfused, "--no-masked-softmax-fusion"]
    arguments += ["transformer_engine"]
    grouped = config.model.num_experts is not None and config.strategy.name == "none"
    if grouped:
        # Megatron's grouped experts do not support biases together with fused dropout.
        unfused = ["--no-bias-dropout-fusion"] if config.model.linear_bias else []
        arguments += ["--moe-grouped-gemm", *unfused]
    return arguments


def _pairs(**values: object) -> list[str]:
    words: list[str] = []
    for name, value in values.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words
