"""Describes a run in the folder of its records, so that no run replaces those of another one."""

import logging
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import validate
from megatron_fssdp.config.run import megatron_options
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.run.run_config import HOMES, SECTIONS, RunConfig
from megatron_fssdp.config.run.sections import ModelArguments
from megatron_fssdp.files import run_lock
from megatron_fssdp.megatron_adapter.all_ranks import of_all_ranks
from megatron_fssdp.megatron_adapter.iterations.host_settings import HostModel, HostSettings
from megatron_fssdp.megatron_adapter.layer.moe_layer import global_number, trained_layers
from megatron_fssdp.megatron_adapter.support.node_detection import ranks_of_node
from megatron_fssdp.records.metrics import METRICS_FILE
from megatron_fssdp.records.run_settings import SETTINGS_FILE, write_recorded_settings

logger = logging.getLogger(__name__)


def check_layers(chunks: Iterable[torch.nn.Module]) -> None:
    """Refuse layers that arrays of all layers cannot describe. Collective over all ranks.

    Raises:
        ConfigurationError: Layers of a rank share a number, or layers have other numbers of experts.
    """
    pairs = (pair for chunk in chunks for pair in trained_layers(chunk))
    own = [(global_number(layer, before), layer.config.num_moe_experts) for layer, before in pairs]
    sizes = {size for layers in of_all_ranks(own) for _, size in layers}
    numbers = [number for number, _ in own]
    if len(set(numbers)) < len(numbers) or len(sizes) > 1:
        of_experts = " and ".join(map(str, sorted(sizes)))
        raise ConfigurationError(
            f"record_dir: got MoE layers {numbers} of {of_experts} experts, wanted another number for each "
            "layer, and equally many experts in all; remove record_dir"
        )


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


def record_folder(asked: Path, run: RunConfig | None, *, resumes: bool) -> Path:
    """Return the asked folder, or one beside it (``…-2``) if the asked one has the records of another run.

    A run that ``resumes`` from a checkpoint continues the latest records of the same run: those with its
    model, its number of ranks and its checkpoints. ``run`` is None if no YAML can describe its settings.
    """
    used: list[Path] = []
    for number in count(1):
        folder = asked if number == 1 else asked.with_name(f"{asked.name}-{number}")
        metrics = folder / METRICS_FILE
        # A run that ended before its first iteration has no records, so its folder is free.
        if not metrics.exists() or not metrics.stat().st_size:
            break
        used.append(folder)
    same = [folder for folder in used if resumes and _is_same(folder, run)]
    if used and not same:
        logger.warning(
            f"[fssdp] record_dir {asked} has the records of another run; those of this run go to {folder}, "
            "because only the same run, continued from its checkpoint, continues its records"
        )
    return same[-1] if same else folder


def _is_same(folder: Path, run: RunConfig | None) -> bool:
    try:
        before = load_run([folder / SETTINGS_FILE])
    except ConfigurationError:  # only the strategy is described
        return run is None
    return run is not None and _identity(before) == _identity(run, with_save=before.training.save is not None)


def _identity(run: RunConfig, *, with_save: bool = True) -> tuple[object, ...]:
    # Megatron's arguments have sizes that a YAML may leave to their defaults.
    model = run.model.model_dump(include=set(ModelArguments.model_fields)) | {
        "kv_channels": run.model.head_width,
        "ffn_hidden_size": run.model.dense_ffn_size,
        "moe_ffn_hidden_size": run.model.expert_ffn_size,
    }
    return model, run.parallelism.world_size, run.training.save if with_save else None
