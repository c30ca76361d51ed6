"""Turns a run's settings into Megatron-LM's command-line arguments."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run import megatron_options
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.strategy.strategy_registry import STRATEGIES

_NO_GPU_KERNELS = {
    **dict.fromkeys(("gradient_accumulation_fusion", "masked_softmax_fusion", "apply_rope_fusion"), False),
    "no_persist_layer_norm": True,
}
"""Without kernels that are in Apex or in Transformer Engine; Megatron does not ask whether they exist."""

ON_CPU = {
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,
    "transformer_impl": "local",
    **_NO_GPU_KERNELS,
    **dict.fromkeys(("bias_gelu_fusion", "bias_dropout_fusion", "bias_swiglu_fusion"), False),
    "disable_jit_fuser": True,
    "num_workers": 0,
}


@dataclass(frozen=True)
class Installation:
    """Whether the ranks run on CPUs, and otherwise which packages they can import."""

    on_cpu: bool
    has_transformer_engine: bool
    has_apex: bool = True


def megatron_arguments(
    config: RunConfig, data: Mapping[str, Any], installation: Installation, out_dir: Path, resume: bool
) -> list[str]:
    """Return the arguments of a Megatron pretraining script for a run.

    What the run gives under Megatron's names wins over what is derived here and over ``data``, the arguments
    that name its data; null removes an argument.

    Raises:
        ConfigurationError: Megatron lacks an argument, or the strategy records elsewhere.
    """
    values = {
        **_derived(config, installation, out_dir),
        **data,
        **config.megatron_values(),
        **_required(config, out_dir, resume),
    }
    return [*megatron_options.words(values), *_strategy_words(config, out_dir)]


def _strategy_words(config: RunConfig, out_dir: Path) -> list[str]:
    """Records go to the output folder, where the progress of the run is read."""
    settings = {"record_dir": str(out_dir), **config.strategy.settings}
    if settings["record_dir"] != str(out_dir):
        raise ConfigurationError(
            f"strategy.settings.record_dir: got {settings['record_dir']}, wanted none, because a run has its "
            f"records in its output folder, {out_dir}; remove it, or give --out"
        )
    declared = config.parallelism.declared_nodes
    if declared is not None and "nodes" in STRATEGIES[config.strategy.name].settings.model_fields:
        settings.setdefault("nodes", declared)
    arguments = ["--moe-strategy", config.strategy.name]
    for key, value in settings.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        arguments += ["--moe-strategy-set", f"{key}={text}"]
    return arguments


def _derived(config: RunConfig, installation: Installation, out_dir: Path) -> dict[str, Any]:
    model, training = config.model, config.training
    values: dict[str, Any] = {"override_opt_param_scheduler": True}
    if training.save_checkpoints:
        values |= {"save_interval": training.train_iters, "ckpt_format": "torch_dist"}
        # Megatron's default stores optimizer states by their position, and re-sharding changes positions.
        values["dist_ckpt_optim_fully_reshardable"] = config.parallelism.use_distributed_optimizer
    if training.profile:
        values["use_pytorch_profiler"] = True
    if training.tensorboard or training.profile:
        values["tensorboard_dir"] = out_dir / "tensorboard"
    values |= {
        "max_position_embeddings": model.seq_length,
        "micro_batch_size": training.micro_batch_size,
        "global_batch_size": config.global_batch_size,
        "lr": training.lr,
        "lr_decay_iters": training.train_iters,
    }
    if training.eval_interval is None:
        values["eval_interval"] = training.train_iters
    if model.num_experts is not None:
        values["moe_token_dispatcher_type"] = "alltoall"
    if installation.on_cpu:
        return {**values, **ON_CPU}
    values["distributed_backend"] = "nccl"
    if not installation.has_transformer_engine:
        return {**values, "transformer_impl": "local", **_NO_GPU_KERNELS}
    values["transformer_impl"] = "transformer_engine"
    if not installation.has_apex:  # The output layer's kernel for it is Apex's, also with Transformer Engine.
        values["gradient_accumulation_fusion"] = False
    if model.num_experts is not None:
        values["moe_grouped_gemm"] = True
        # Megatron's grouped experts do not support biases together with fused dropout.
        values |= {"bias_dropout_fusion": False} if model.add_bias_linear else {}
    return values


def _required(config: RunConfig, out_dir: Path, resume: bool) -> dict[str, Any]:
    """Return what the settings decide together, whatever they give under a single name."""
    model, training = config.model, config.training
    own = training.save or out_dir / "checkpoints"
    load = own if resume else training.load
    values: dict[str, Any] = {"save": own if training.save_checkpoints else None, "load": load}
    if load is None:
        # The learning-rate schedule follows this run's settings, which can differ from the checkpoint's.
        values["override_opt_param_scheduler"] = None
    if training.eval_interval is None:
        values["eval_iters"] = 0  # without validation data Megatron would search for tokens forever
    if model.num_experts is not None and model.moe_router_topk == 1:
        values["moe_router_pre_softmax"] = True  # Megatron refuses the other order
    if resume:
        values["profile"] = None  # it would count the iterations from the start of the resumed run
    return values
