"""Reads a run's settings back from Megatron-LM's parsed arguments, for runs that no YAML describes."""

from collections.abc import Mapping
from typing import Any, Literal

from megatron_fssdp.config.loading import validate
from megatron_fssdp.config.run.run_config import RunConfig

_MODEL_KEYS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "seq_length": "seq_length",
    "ffn_hidden_size": "ffn_hidden_size",
    "qk_layernorm": "qk_layernorm",
    "multi_latent_attention": "multi_latent_attention",
    "normalization": "normalization",
    "position_embedding": "position_embedding_type",
    "rotary_base": "rotary_base",
    "linear_bias": "add_bias_linear",
    "hidden_dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout",
    "init_std": "init_method_std",
    "activation_clamp": "activation_func_clamp_value",
    "glu_linear_offset": "glu_linear_offset",
    "mtp_num_layers": "mtp_num_layers",
    "mtp_loss_scaling_factor": "mtp_loss_scaling_factor",
}
_LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_MOE_KEYS = {
    "num_experts": "num_experts",
    "moe_top_k": "moe_router_topk",
    "moe_layer_freq": "moe_layer_freq",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "moe_shared_expert_size": "moe_shared_expert_intermediate_size",
    "moe_z_loss_coeff": "moe_z_loss_coeff",
    "moe_pre_softmax": "moe_router_pre_softmax",
    "moe_router_dtype": "moe_router_dtype",
    "moe_score_function": "moe_router_score_function",
    "moe_expert_bias": "moe_router_enable_expert_bias",
    "moe_expert_bias_rate": "moe_router_bias_update_rate",
    "moe_num_groups": "moe_router_num_groups",
    "moe_group_top_k": "moe_router_group_topk",
    "moe_scaling_factor": "moe_router_topk_scaling_factor",
}
_PARALLELISM_KEYS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "sequence": "sequence_parallel",
    "distributed_optimizer": "use_distributed_optimizer",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
}
_STAGE_ARGUMENTS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)
"""Arguments for unequal pipeline stages, which a run's YAML has only as ``megatron_args``."""

_TRAINING_KEYS = {
    "iterations": "train_iters",
    "micro_batch_size": "micro_batch_size",
    "global_batch_size": "global_batch_size",
    "optimizer": "optimizer",
    "lr": "lr",
    "min_lr": "min_lr",
    "lr_schedule": "lr_decay_style",
    "weight_decay": "weight_decay",
    "clip_grad": "clip_grad",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "seed": "seed",
    "log_interval": "log_interval",
}


def run_config_from_arguments(
    args: Any, family: Literal["gpt", "bert"], ranks_per_node: int, on_cpu: bool, strategy: Mapping[str, Any]
) -> RunConfig:
    """Describe a run by its parsed arguments.

    Args:
        args: Megatron's arguments after its own checks.
        family: Kind of the model that the script built.
        ranks_per_node: Number of ranks on each machine.
        on_cpu: Whether the ranks run on CPUs.
        strategy: Name and settings of the strategy, as in a run's YAML.

    Returns:
        The settings. Keys whose value the arguments do not have keep their defaults. The data is described as
        external, with the size of the vocabulary.

    Raises:
        ConfigurationError: A run's YAML cannot describe these arguments.
    """
    data = {
        "model": _model(args, family),
        "data": {"external": True, "vocab_size": max(_vocabulary(args), 257)},
        "parallelism": _parallelism(args, ranks_per_node),
        "training": _training(args, on_cpu),
        "strategy": dict(strategy),
        "megatron_args": [
            word
            for name in _STAGE_ARGUMENTS
            if (value := getattr(args, name, None)) is not None
            for word in (f"--{name.replace('_', '-')}", str(value))
        ],
    }
    return validate(RunConfig, data, "Megatron's arguments")


def _taken(args: Any, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of arguments by key. Absent ones and None keep the defaults of the settings."""
    values = {key: getattr(args, name, None) for key, name in keys.items()}
    return {key: value for key, value in values.items() if value is not None}


def _model(args: Any, family: str) -> dict[str, Any]:
    model = {"family": family, **_taken(args, _MODEL_KEYS)}
    for name in ("norm_epsilon", "layernorm_epsilon"):  # Megatron 0.18, and 0.19 and newer
        model.update(_taken(args, {"norm_epsilon": name}))
    model["activation"] = next(
        (
            name
            for name in ("swiglu", "squared_relu", "openai_gelu", "quick_geglu")
            if getattr(args, name, False)
        ),
        "gelu",
    )
    model["tie_embeddings"] = not getattr(args, "untie_embeddings_and_output_weights", False)
    if getattr(args, "multi_latent_attention", False):
        model.update(_taken(args, {key: key for key in _LATENT_KEYS}))
    else:
        model.update(_taken(args, {"kv_channels": "kv_channels"}))
        if getattr(args, "group_query_attention", False):
            model.update(_taken(args, {"num_query_groups": "num_query_groups"}))
    window = getattr(args, "window_size", None)
    if window is not None:
        model["window_size"] = int(window[0]) + 1
        model.update(_taken(args, {"full_attention_freq": "window_attn_skip_freq"}))
    model["attention_sinks"] = getattr(args, "softmax_type", None) == "learnable"
    if getattr(args, "num_experts", None) is not None:
        model.update(_experts(args))
    return model


def _experts(args: Any) -> dict[str, Any]:
    experts = _taken(args, _MOE_KEYS)
    if not isinstance(experts.get("moe_layer_freq", 1), int):
        experts["moe_layer_freq"] = list(experts["moe_layer_freq"])
    experts["moe_balancing"] = _only(getattr(args, "moe_router_load_balancing_type", "none"))
    weight = _only(getattr(args, "moe_aux_loss_coeff", 0.0))
    experts["moe_aux_loss_coeff"] = weight if experts["moe_balancing"] != "none" else 0.0
    return experts


def _only(value: Any) -> Any:
    """Return the item of a list of one, and other values unchanged."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _parallelism(args: Any, ranks_per_node: int) -> dict[str, Any]:
    cut = _taken(args, _PARALLELISM_KEYS)
    if getattr(args, "num_experts", None) is not None:
        cut.update(_taken(args, {"expert": "expert_model_parallel_size"}))
        cut.update(_taken(args, {"expert_tensor": "expert_tensor_parallel_size"}))
    return {**cut, "nproc_per_node": ranks_per_node, "num_nodes": max(args.world_size // ranks_per_node, 1)}


def _training(args: Any, on_cpu: bool) -> dict[str, Any]:
    training = _taken(args, _TRAINING_KEYS)
    training["device"] = "cpu" if on_cpu else "cuda"
    training["precision"] = next((name for name in ("bf16", "fp16") if getattr(args, name, False)), "fp32")
    training["recompute"] = getattr(args, "recompute_granularity", None) or "none"
    warm_up = getattr(args, "lr_warmup_iters", 0) or 0
    training["warmup_iterations"] = max(0, min(warm_up, (args.train_iters or 1) - 1))
    return training


def _vocabulary(args: Any) -> int:
    return int(getattr(args, "vocab_size", None) or getattr(args, "padded_vocab_size", None) or 0)
