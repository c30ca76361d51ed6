"""How far a run of a sweep is. Only the run's folder decides, so every start of a sweep knows it."""

from contextlib import suppress
from typing import Any, Literal

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.launch.run_folder import RunFolder, has_checkpoint, last_checkpoint
from megatron_fssdp.launch.train_request import TrainRequest
from megatron_fssdp.records.metrics_file import read_metrics
from megatron_fssdp.records.run_settings import flat_settings, run_config_of

RunState = Literal["new", "again", "continue", "finished"]
"""new: nothing was run. again: the run has no checkpoint to continue from; it is moved aside and started
again. continue: the last checkpoint is continued from. finished: all iterations are recorded and saved."""


def state_of(request: TrainRequest) -> RunState:
    """Return how far the run with these options is.

    Raises:
        ConfigurationError: The folder holds a run with other settings.
    """
    folder, config = request.folder, request.resolve()
    if not folder.taken():
        return "new"
    if not folder.config.exists():
        return "again"
    _check_same(folder, config)
    wanted = config.training.train_iters
    saved = last_checkpoint(folder.checkpoints, "--out") if has_checkpoint(folder.checkpoints) else 0
    is_saved = saved >= wanted or not config.training.save_checkpoints
    if is_saved and _recorded_iterations(folder) >= wanted:
        return "finished"
    return "continue" if 0 < saved < wanted else "again"


def _recorded_iterations(folder: RunFolder) -> int:
    """Return the number of the last recorded iteration; 0 without records, or if they are damaged."""
    with suppress(ConfigurationError, IndexError):
        return read_metrics(folder.path)[-1].iteration
    return 0


def _check_same(folder: RunFolder, config: RunConfig) -> None:
    recorded = _settings(run_config_of(folder.path), config)
    wanted = _settings(config, config)
    for key in {**recorded, **wanted}:
        if recorded.get(key) != wanted.get(key):
            raise ConfigurationError(
                f"{folder.path} holds a run with {key} {recorded.get(key)}, wanted {wanted.get(key)}; give "
                "another --out, or delete that folder"
            )


def _settings(config: RunConfig, asked: RunConfig) -> dict[str, Any]:
    settings = flat_settings(config.model_dump(mode="json"))
    if asked.data.path is None:  # training fills in the folder of the default data
        settings.pop("data.path", None)
    return settings
