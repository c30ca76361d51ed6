"""The settings of a recorded run, ``config.yaml``, and whether the losses of runs can be compared."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fssdp.config.loading import load_yaml, validate
from megatron_fssdp.config.run.megatron_options import options, plain
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.yaml_text import format_yaml
from megatron_fssdp.files.written_files import written_file

SETTINGS_FILE = "config.yaml"
RECORDED_RUN_HEADER = "# What this run was started with; `megatron-fssdp train` takes it as it is.\n"
"""First line of the ``config.yaml`` that `megatron-fssdp train` writes into the folder of a run."""

_HEADER = "# What Megatron's arguments say about this run. Reports and the simulator read it.\n"
_MOST_NAMED = 4
_SCHEDULE = ("train_iters", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters")
_DECIDES = {
    **{"model": "model", "data": "data", "training.global_batch_size": "data"},
    **{f"training.{name}": "learning-rate schedule" for name in _SCHEDULE},
}
"""What a setting, or all settings of a section, decide about the loss."""


def write_recorded_settings(record_dir: Path, run: RunConfig | None, strategy: Mapping[str, Any]) -> bool:
    """Write what is known about a run, or raise a ConfigurationError. ``run`` is None if no YAML can say it.

    Return False, and write nothing, where ``megatron-fssdp train`` has already written its settings.
    """
    path = record_dir / SETTINGS_FILE
    if path.is_file() and path.read_bytes().startswith(RECORDED_RUN_HEADER.encode()):
        return False
    settings = {"strategy": dict(strategy)} if run is None else run.model_dump(mode="json")
    with written_file(path, "record_dir") as partial:
        partial.write_text(_HEADER + format_yaml(settings), encoding="utf-8")
    return True


def run_config_of(path: Path) -> RunConfig:
    """Return the settings of a run, or raise a ConfigurationError."""
    config = path / SETTINGS_FILE
    return validate(RunConfig, load_yaml(config), str(config))


def flat_settings(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested keys and values by dotted key. Empty mappings are left out."""
    if not isinstance(value, dict) or not value:
        return {} if value == {} else {prefix: value}
    name = f"{prefix}." if prefix else ""
    return {
        key: inner
        for part, value in value.items()
        for key, inner in flat_settings(value, f"{name}{part}").items()
    }


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the settings in which runs differ, by dotted key: each run's value as text, or ``–``.

    A run without any settings counts as equal.
    """
    known = [given for given in settings if given]
    differing = {}
    for key in dict.fromkeys(key for given in known for key in given):
        # A missing key stands for Megatron's default, unless the whole section is unknown.
        section, _, argument = key.partition(".")
        option = options().get(argument)
        default = plain(option.default) if option else None
        values = [
            given.get(key, default) for given in known if section in {name.split(".")[0] for name in given}
        ]
        if any(value != values[0] for value in values) and not (key == "data.path" and _is_same_data(values)):
            differing[key] = tuple(_text(given.get(key)) for given in settings)
    return differing


def loss_obstacle(settings: Sequence[Mapping[str, Any]]) -> str:
    """Return why the losses of runs cannot be compared, with the settings that differ; empty if they can.

    Comparable runs train the same model with the same batches and learning rates.
    """
    differing, kinds = differing_settings(settings), dict[str, str]()
    for key in differing:
        if kind := _DECIDES.get(key) or _DECIDES.get(key.partition(".")[0]):
            kinds[key] = kind
    if not kinds:
        return ""
    named = [f"{key} {' and '.join(differing[key])}" for key in list(kinds)[:_MOST_NAMED]]
    if len(kinds) > _MOST_NAMED:
        named.append(f"and {len(kinds) - _MOST_NAMED} more")
    return f"different {' and '.join(dict.fromkeys(kinds.values()))} ({', '.join(named)})"


def _is_same_data(paths: Sequence[Any]) -> bool:
    """Whether folders hold the same built data, by the hashes in their manifests."""
    try:
        manifests = [json.loads((Path(path) / "manifest.json").read_text(encoding="utf-8")) for path in paths]
        return all(manifest["files"] == manifests[0]["files"] for manifest in manifests)
    except (OSError, TypeError, ValueError, KeyError):
        return False


def _text(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
