"""Compares the settings of recorded runs, and says whether their losses can be compared."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_fssdp.config.loading import load_yaml
from megatron_fssdp.reporting.records.recorded_run import RecordedRun

MOST_NAMED = 4
"""Number of differing settings that an error message names."""

_DATA_PATH = "data.path"
_MANIFEST = "manifest.json"
_SCHEDULE = ("train_iters", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters")


def recorded_settings(run: RecordedRun) -> dict[str, Any]:
    """Return the settings in a run's ``config.yaml`` by dotted key. It is empty without this file."""
    config = run.path / "config.yaml"
    return flat_settings(load_yaml(config)) if config.exists() else {}


def differing_settings(runs: Sequence[RecordedRun]) -> dict[str, tuple[str, ...]]:
    """Return the settings in which runs differ.

    Args:
        runs: Records of the runs. A run without ``config.yaml`` has unknown settings, which count as equal.

    Returns:
        The value in each run as text, by dotted key. ``–``: not set or unknown.
    """
    found = [recorded_settings(run) for run in runs]
    known = [settings for settings in found if settings]
    differing = [key for key in dict.fromkeys(key for one in known for key in one) if _differs(key, known)]
    if _DATA_PATH in differing and _is_same_data([settings.get(_DATA_PATH) for settings in known]):
        differing.remove(_DATA_PATH)
    return {key: tuple(_text(settings.get(key)) for settings in found) for key in differing}


def loss_obstacle(runs: Sequence[RecordedRun]) -> str:
    """Return why the losses of runs cannot be compared, with the settings that differ. Empty if they can.

    Losses can be compared if the runs train the same model with the same batches and the same learning rates.

    Args:
        runs: Records of the runs.
    """
    differing = differing_settings(runs)
    kinds = {key: kind for key in differing if (kind := _kind(key))}
    if not kinds:
        return ""
    named = [f"{key} {' and '.join(differing[key])}" for key in list(kinds)[:MOST_NAMED]]
    if len(kinds) > MOST_NAMED:
        named.append(f"and {len(kinds) - MOST_NAMED} more")
    return f"different {' and '.join(dict.fromkeys(kinds.values()))} ({', '.join(named)})"


def _kind(key: str) -> str:
    """Return what a setting decides about the loss, or an empty string."""
    section, _, name = key.partition(".")
    if section == "model":
        return "model"
    if section == "data" or key == "training.global_batch_size":
        return "data"
    if section == "training" and name in _SCHEDULE:
        return "learning-rate schedule"
    return ""


def _differs(key: str, known: Sequence[dict[str, Any]]) -> bool:
    # A missing key stands for a default, unless the whole section is unknown.
    section = key.partition(".")[0]
    values = [one.get(key) for one in known if any(name.partition(".")[0] == section for name in one)]
    return any(value != values[0] for value in values)


def _is_same_data(paths: Sequence[Any]) -> bool:
    """Whether folders hold the same built data, by the hashes in their manifests."""
    try:
        manifests = [json.loads((Path(path) / _MANIFEST).read_text(encoding="utf-8")) for path in paths]
        return all(one["files"] == manifests[0]["files"] for one in manifests)
    except (OSError, TypeError, ValueError, KeyError):
        return False


def flat_settings(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested keys and values by dotted key. Empty mappings are left out.

    Args:
        value: A mapping, or an inner value of one.
        prefix: Dotted key of the value.
    """
    if not isinstance(value, dict) or not value:
        return {} if value == {} else {prefix: value}
    name = f"{prefix}." if prefix else ""
    return {
        key: inner
        for part, value in value.items()
        for key, inner in flat_settings(value, f"{name}{part}").items()
    }


def _text(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
