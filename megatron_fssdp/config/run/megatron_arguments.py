"""Turns a run's settings into Megatron-LM's command-line arguments, and parsed arguments into settings."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import validate
from megatron_fssdp.config.run import megatron_options
from megatron_fssdp.config.run.run_config import HOMES, SECTIONS, RunConfig
from megatron_fssdp.config.run.sections import TrainingArguments
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

LAUNCH_ORDER = ("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
"""NCCL asks for this variable where communicators are used at the same time; before 2.26 it is ignored."""


@dataclass(frozen=True)
class TokenizedData:
    """Tokenized data: ``prefix`` of its ``.bin`` and ``.idx`` files, and a folder for Megatron's caches.

    ``vocab_size`` includes the id that ends a document.
    """

    prefix: Path
    vocab_size: int
    eod_id: int
    num_documents: int | None
    cache_dir: Path


@dataclass(frozen=True)
class Installation:
    """Whether the ranks run on CPUs, and otherwise which packages they can import."""

    on_cpu: bool
    has_transformer_engine: bool
    has_apex: bool = True


def megatron_arguments(
    config: RunConfig, data: TokenizedData | None, installation: Installation, out_dir: Path, resume: bool
) -> list[str]:
    """Return the arguments of a Megatron pretraining script for a run.

    What the run gives under Megatron's names wins over what is derived here, and null removes it. ``data`` is
    None for ``data.external``.

    Raises:
        ConfigurationError: The data has too few documents for its split, or Megatron lacks an argument.
    """
    values = {
        **_derived(config, installation, out_dir),
        **({} if data is None else _data_values(config, data)),
        **config.megatron_values(),
        **_required(config, out_dir, resume),
    }
    return [*megatron_options.words(values), *_strategy_words(config, out_dir)]


def _strategy_words(config: RunConfig, out_dir: Path) -> list[str]:
    """Records go to the output folder unless the settings name another one."""
    settings = {"record_dir": str(out_dir), **config.strategy.settings}
    declared = config.parallelism.declared_nodes
    if declared is not None and "nodes" in STRATEGIES[config.strategy.name].settings.model_fields:
        settings.setdefault("nodes", declared)
    arguments = ["--moe-strategy", config.strategy.name]
    for key, value in settings.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        arguments += ["--moe-strategy-set", f"{key}={text}"]
    return arguments


def trace_folder(training: TrainingArguments, out_dir: Path) -> Path:
    """Return the folder to which Megatron writes the profiler's traces, beside that of the board."""
    return (training.tensorboard_dir or out_dir / "tensorboard").parent / "torch_profile"


def run_config_from_arguments(
    args: Any, family: Literal["gpt", "bert"], ranks_per_node: int, on_cpu: bool, strategy: Mapping[str, Any]
) -> RunConfig:
    """Describe a run by Megatron's checked arguments, or raise a ConfigurationError if a YAML cannot.

    The settings have what the package computes with, and what differs from Megatron's default.
    """
    data: dict[str, Any] = {section: {} for section in SECTIONS}
    for name, action in megatron_options.options().items():
        value = megatron_options.plain(getattr(args, name, None))
        is_plain = isinstance(value, str | int | float | list)
        if is_plain and (name in HOMES or value != megatron_options.plain(action.default)):
            data[HOMES.get(name) or megatron_options.section_of(name)][name] = value
    warm_up, last = data["training"].get("lr_warmup_iters", 0), (args.train_iters or 1) - 1
    num_nodes = max(args.world_size // ranks_per_node, 1)
    data["model"]["family"] = family
    data["parallelism"] |= {"nproc_per_node": ranks_per_node, "num_nodes": num_nodes}
    data["training"] |= {
        "device": "cpu" if on_cpu else "cuda",
        "save_checkpoints": getattr(args, "save", None) is not None,
        "lr_warmup_iters": max(0, min(warm_up, last)),
    }
    vocabulary = getattr(args, "vocab_size", None) or getattr(args, "padded_vocab_size", None) or 0
    data["data"] = {"external": True, "vocab_size": max(int(vocabulary), 257)}
    return validate(RunConfig, {**data, "strategy": dict(strategy)}, "Megatron's arguments")


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


def _data_values(config: RunConfig, data: TokenizedData) -> dict[str, Any]:
    return {
        "data_path": data.prefix,
        "data_cache_path": data.cache_dir,
        "split": _split(config, data),
        "tokenizer_type": "NullTokenizer",  # text never contains the id that ends a document
        "vocab_size": data.vocab_size,
        "null_tokenizer_eod_id": data.eod_id,
        # BERT's script needs the vocabulary itself, because it masks whole words.
        "tokenizer_model": data.prefix.parent if config.model.family == "bert" else None,
    }


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
