"""The output folder of a training run."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.run.sections import TrainingArguments
from megatron_fssdp.config.run_lock import refuse_live
from megatron_fssdp.config.written_files import cannot_write, refuse_non_folder, written_whole
from megatron_fssdp.config.yaml_text import format_yaml
from megatron_fssdp.records.run_log import STOP_MARK
from megatron_fssdp.records.run_settings import RECORDED_RUN_HEADER, run_config_of

# A checkpoint's optimizer states are valid only with the same values of these keys.
_FIXED_TRAINING_KEYS = frozenset({"optimizer", "lr", "min_lr", "bf16", "fp16"})

_FILES_OF_A_RUN = (
    *("config.yaml", "overrides.yaml", "metrics.jsonl", "evaluations.jsonl", "loads.npy", "placements.npy"),
    *("log.txt", "checkpoints", "tensorboard", "torch_profile"),
)
_OVERRIDES_HEADER = "# What options of `megatron-fssdp train` changed in the YAML files; --resume keeps it.\n"


@dataclass(frozen=True)
class RunFolder:
    """Output folder of a run, with its path, and the files in it."""

    path: Path

    @property
    def config(self) -> Path:
        """File with the combined settings of the run."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """File with the metrics: one JSON object per iteration, one per line."""
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """File with the output of all ranks."""
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        """Folder of Megatron's checkpoints."""
        return self.path / "checkpoints"

    @property
    def overrides(self) -> Path:
        """File with the settings that options changed, in the form of a run's YAML."""
        return self.path / "overrides.yaml"

    def note_stop(self, iteration: int, reason: str) -> None:
        """Write to the log that the ranks ended after an iteration (0: before the first); pages show it.

        A full disk must not hide the reason, so an error of the system is ignored.
        """
        with suppress(OSError), self.log.open("a", encoding="utf-8") as log:
            log.write(f"{STOP_MARK} {iteration}: {reason}\n")

    def check(self, training: TrainingArguments, resume: bool, overwrite: bool = False) -> None:
        """Refuse a folder that cannot hold a new run, or cannot be resumed.

        Args:
            training: Training settings of the run, which name its iterations and checkpoint folders.
            resume: Whether to continue the run in the folder.
            overwrite: Whether a new run may take the place of the run in the folder.

        Raises:
            ConfigurationError: The folder holds another run or a live one, it has no checkpoint to resume
                from, or the run in it is finished.
        """
        refuse_non_folder(self.path, "--out")
        if resume and overwrite:
            raise ConfigurationError(
                "--resume and --overwrite exclude each other: one continues the run in the folder, the other "
                "starts a new one; give one of them"
            )
        refuse_live(self.path, "--out")
        taken = self.taken()
        checkpoints = training.save or self.checkpoints
        if not resume and not overwrite and taken:
            next_step = (
                "continue it with --resume, move it aside with --overwrite"
                if has_checkpoint(checkpoints)
                else "it has no checkpoint to continue from, so move it aside with --overwrite"
            )
            raise ConfigurationError(
                f"--out {self.path}: already holds a run ({', '.join(taken)}); {next_step}, or choose "
                "another folder"
            )
        if resume:
            done = last_checkpoint(checkpoints, "--resume", instead="start the run again with --overwrite")
            if done >= training.train_iters:
                raise ConfigurationError(
                    f"--resume: {self.path} has already finished {done} iterations; ask for more with --iters"
                )
        elif training.load is not None:
            last_checkpoint(training.load, "training.load")

    def taken(self) -> list[str]:
        """Return the names of the files and folders of an earlier run in the folder."""
        return [name for name in _FILES_OF_A_RUN if (self.path / name).exists()]

    def move_aside(self) -> Path | None:
        """Rename the folder, if it holds a run, and return its new path; nothing is deleted.

        Raises:
            ConfigurationError: The folder cannot be renamed.
        """
        if not self.taken():
            return None
        place = self.path.resolve()
        aside = place.with_name(f"{place.name}.old-{datetime.now():%Y%m%d-%H%M%S}")
        try:
            os.rename(place, aside)
        except OSError as error:
            raise cannot_write(aside, "--overwrite", error) from None
        return aside

    def check_unchanged(self, config: RunConfig) -> None:
        """Refuse to resume with another model or optimizer than the one of the checkpoints.

        Raises:
            ConfigurationError: The settings differ from those that the run started with, or the run's
                ``config.yaml`` is damaged.
        """
        before = run_config_of(self.path)
        for section in ("model", "training"):
            then, now = getattr(before, section), getattr(config, section)
            for name in dict.fromkeys((*dict(then), *dict(now))):
                fixed = section == "model" or name in _FIXED_TRAINING_KEYS
                old, new = (getattr(one, name, None) for one in (then, now))
                if fixed and old != new:
                    raise ConfigurationError(
                        f"--resume: {section}.{name} is {new}, but {self.path} was started with {old}; use "
                        "this value, or start a new run"
                    )

    def create(self, config: RunConfig, overrides: Mapping[str, Any] | None = None) -> None:
        """Create the folder and write the settings of the run.

        Args:
            config: All settings of the run.
            overrides: The part of them that options changed. A resumed run keeps this part.

        Raises:
            ConfigurationError: The folder cannot be written.
        """
        text = format_yaml(config.model_dump(mode="json"))
        with written_whole(self.path, "--out", is_ours=True) as partial:  # the run in it is resumed
            (partial / self.config.name).write_text(RECORDED_RUN_HEADER + text, encoding="utf-8")
            (partial / self.overrides.name).write_text(
                _OVERRIDES_HEADER + format_yaml(dict(overrides or {})), encoding="utf-8"
            )


def has_checkpoint(folder: Path) -> bool:
    """Whether a folder has a complete checkpoint."""
    with suppress(ConfigurationError):
        last_checkpoint(folder, "")
        return True
    return False


def last_checkpoint(folder: Path, asked_by: str, instead: str = "start a new run") -> int:
    """Return the iteration of the newest checkpoint in Megatron's checkpoint folder.

    Raises:
        ConfigurationError: The folder has no checkpoint. The message begins with the option or setting that
            names the folder, and ends with what the user can do without a checkpoint.
    """
    path = folder / "latest_checkpointed_iteration.txt"
    try:
        text = path.read_text(encoding="utf-8").strip()
        return 0 if text == "release" else int(text)
    except (OSError, ValueError):
        raise ConfigurationError(
            f"{asked_by}: no checkpoint in {folder}; give a folder with a checkpoint, or {instead}"
        ) from None
