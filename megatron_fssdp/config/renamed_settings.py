"""Settings that were renamed: old spellings are refused with the new one, or translated in recorded runs.

A user's file or flag with an old spelling is refused, so that every file in use has one spelling. The
``config.yaml`` of a run folder is a record and stays readable: its old spellings are translated when it is
read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORDED_RUN_HEADER = "# What this run was started with; `megatron-fssdp train` takes it as it is.\n"
"""First line of the ``config.yaml`` that a run writes into its folder."""

_NEW_BY_OLD: dict[tuple[str, str], tuple[str, Any]] = {
    ("schedule", "plain"): ("smart_schedule", False),
    ("schedule", "pipelined"): ("smart_schedule", True),
    ("exchange", "two_step"): ("schedule", "megatron"),
    ("exchange", "fused"): ("schedule", "s1"),
}
"""New key and value of each renamed ``(key, value)``."""


def with_new_spellings(run: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the old spellings in a recorded run.

    Args:
        run: The plain values of a run folder's ``config.yaml``; they are left unchanged.

    Returns:
        The same values, with old strategy settings under their new keys.
    """
    section = run.get("strategy")
    settings = section.get("settings") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or not isinstance(settings, Mapping):
        return dict(run)
    translated = dict(_translated(key, value) for key, value in settings.items())
    return {**run, "strategy": {**section, "settings": translated}}


def is_recorded_run(path: Path) -> bool:
    """Whether a readable YAML file is the ``config.yaml`` that a run wrote."""
    with path.open(encoding="utf-8") as file:
        return file.readline() == RECORDED_RUN_HEADER


def _translated(key: str, value: Any) -> tuple[str, Any]:
    return _NEW_BY_OLD.get((key, value), (key, value)) if isinstance(value, str) else (key, value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
