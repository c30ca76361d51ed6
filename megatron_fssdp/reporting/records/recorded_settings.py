"""Writes ``config.yaml`` into the folder of a run that a user's own script started."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.written_files import written_file
from megatron_fssdp.config.yaml_text import format_yaml

SETTINGS_FILE = "config.yaml"
RECORDED_RUN_HEADER = "# What this run was started with; `megatron-fssdp train` takes it as it is.\n"
"""First line of the ``config.yaml`` that `megatron-fssdp train` writes into the folder of a run."""

_HEADER = "# What Megatron's arguments say about this run. Reports and the simulator read it.\n"


def write_recorded_settings(record_dir: Path, run: RunConfig | None, strategy: Mapping[str, Any]) -> bool:
    """Write what is known about a run, unless ``megatron-fssdp train`` has already written its settings.

    Args:
        record_dir: Folder of the run's records.
        run: All settings, or None if a run's YAML cannot describe them.
        strategy: Name and settings of the strategy, which alone are written if ``run`` is None.

    Returns:
        Whether the file was written.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    path = record_dir / SETTINGS_FILE
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            if file.readline() == RECORDED_RUN_HEADER:
                return False
    data = {"strategy": dict(strategy)} if run is None else run.model_dump(mode="json")
    with written_file(path, "record_dir") as partial:
        partial.write_text(_HEADER + format_yaml(data), encoding="utf-8")
    return True
