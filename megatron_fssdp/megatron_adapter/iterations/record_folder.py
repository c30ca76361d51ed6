"""Finds the folder for the records of a run, so that no run replaces those of another one."""

import logging
from itertools import count
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.composition import load_run
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.run.sections import ModelArguments
from megatron_fssdp.files import run_lock
from megatron_fssdp.records.metrics import METRICS_FILE
from megatron_fssdp.records.run_settings import SETTINGS_FILE

logger = logging.getLogger(__name__)


def record_folder(asked: Path, run: RunConfig | None, *, resumes: bool) -> Path:
    """Return the asked folder, or one beside it (``…-2``) if the asked one has the records of another run.

    A run that ``resumes`` from a checkpoint continues the latest records of the same run: those with its
    model, its number of ranks and its checkpoints. ``run`` is None if no YAML can describe its settings.
    """
    used: list[Path] = []
    for number in count(1):
        folder = asked if number == 1 else asked.with_name(f"{asked.name}-{number}")
        metrics = folder / METRICS_FILE
        # A run that ended before its first iteration has no records, so its folder is free, but not that of
        # another model of this process, whose first iteration may be open.
        if not run_lock.holds(folder) and (not metrics.exists() or not metrics.stat().st_size):
            break
        used.append(folder)
    same = [folder for folder in used if resumes and _is_same(folder, run)]
    if used and not same:
        logger.warning(
            f"[fssdp] record_dir {asked} has the records of another run or model; these go to {folder}, "
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
