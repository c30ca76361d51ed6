"""Describes a host's run by the settings of the package, in the folder of its records."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import validate
from megatron_fssdp.config.run import megatron_options
from megatron_fssdp.config.run.run_config import HOMES, SECTIONS, RunConfig
from megatron_fssdp.files import run_lock
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostModel, HostSettings
from megatron_fssdp.megatron_adapter.support.node_detection import ranks_of_node
from megatron_fssdp.records.record_folder import record_folder
from megatron_fssdp.records.run_settings import write_recorded_settings

logger = logging.getLogger(__name__)


def describe_run(asked: Path, model: HostModel) -> Path:
    """Write ``config.yaml`` from a host's settings, and return the folder that also gets the records."""
    is_bert = any(
        type(module).__name__ == "BertModel" for chunk in model.chunks for module in chunk.modules()
    )
    settings = model.settings.model_dump(mode="json", exclude_defaults=True, exclude={"record_dir"})
    strategy = {"name": model.name, "settings": settings}
    where = ranks_of_node(dist.get_world_size()), not torch.cuda.is_available()
    run: RunConfig | None = None
    try:
        run = described_config(model.host, "bert" if is_bert else "gpt", *where, strategy)
    except ConfigurationError as error:
        logger.info(f"[fssdp] config.yaml has only the strategy, so simulate needs --model: {error}")
    folder = record_folder(asked, run, resumes=model.host.resumes())
    run_lock.hold(folder, "record_dir")
    write_recorded_settings(folder, run, strategy)
    return folder


def described_config(
    host: HostSettings,
    family: Literal["gpt", "bert"],
    ranks_per_node: int,
    on_cpu: bool,
    strategy: Mapping[str, Any],
) -> RunConfig:
    """Describe a run by Megatron's names, or raise a ConfigurationError if a YAML cannot.

    The settings have what the package computes with, and what differs from Megatron's default.
    """
    settings: dict[str, Any] = {section: {} for section in SECTIONS}
    for name, action in megatron_options.options().items():
        value = megatron_options.plain(getattr(host, name))
        is_plain = isinstance(value, str | int | float | list)
        if is_plain and (name in HOMES or value != megatron_options.plain(action.default)):
            settings[HOMES.get(name) or megatron_options.section_of(name)][name] = value
    warm_up, last = settings["training"].get("lr_warmup_iters", 0), (host.train_iters or 1) - 1
    num_nodes = max((host.world_size or dist.get_world_size()) // ranks_per_node, 1)
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
