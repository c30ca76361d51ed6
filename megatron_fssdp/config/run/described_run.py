"""Describes a run by Megatron's arguments, the other way round than ``megatron_arguments.py``."""

from collections.abc import Mapping
from typing import Any, Literal

from megatron_fssdp.config.loading import validate
from megatron_fssdp.config.run import megatron_options
from megatron_fssdp.config.run.run_config import HOMES, SECTIONS, RunConfig


def described_config(
    host: Any,
    family: Literal["gpt", "bert"],
    world_size: int,
    ranks_per_node: int,
    on_cpu: bool,
    strategy: Mapping[str, Any],
) -> RunConfig:
    """Describe a run by a host's attributes with Megatron's names, which are ``None`` if it has none.

    The settings have what the package computes with, and what differs from Megatron's default.

    Raises:
        ConfigurationError: A YAML cannot describe the run.
    """
    settings: dict[str, Any] = {section: {} for section in SECTIONS}
    for name, action in megatron_options.options().items():
        value = megatron_options.plain(getattr(host, name))
        is_plain = isinstance(value, str | int | float | list)
        if is_plain and (name in HOMES or value != megatron_options.plain(action.default)):
            settings[HOMES.get(name) or megatron_options.section_of(name)][name] = value
    warm_up, last = settings["training"].get("lr_warmup_iters", 0), (host.train_iters or 1) - 1
    num_nodes = max(world_size // ranks_per_node, 1)
    settings["model"]["family"] = family
    if host.num_moe_experts:  # megatron-core's name
        settings[HOMES.get("num_experts") or megatron_options.section_of("num_experts")]["num_experts"] = (
            host.num_moe_experts
        )
    settings["parallelism"] |= {"nproc_per_node": ranks_per_node, "num_nodes": num_nodes}
    settings["training"] |= {
        "device": "cpu" if on_cpu else "cuda",
        "save_checkpoints": host.save is not None,
        "lr_warmup_iters": max(0, min(warm_up, last)),
    }
    vocabulary = host.vocab_size or host.padded_vocab_size or 0
    settings["data"] = {"external": True, "vocab_size": max(int(vocabulary), 257)}
    return validate(RunConfig, {**settings, "strategy": dict(strategy)}, "Megatron's arguments")
