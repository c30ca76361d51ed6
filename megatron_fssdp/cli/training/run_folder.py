"""The output folder of a training run."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.run.sections import TrainingArguments
from megatron_fssdp.config.written_files import refuse_non_folder, written_whole
from megatron_fssdp.config.yaml_text import format_yaml
from megatron_fssdp.records.evaluations import EVALUATIONS_FILE
from megatron_fssdp.records.loads import LOADS_FILE
from megatron_fssdp.records.metrics_file import METRICS_FILE
from megatron_fssdp.records.placements import PLACEMENTS_FILE
from megatron_fssdp.records.run_log import STOP_MARK
from megatron_fssdp.records.run_settings import RECORDED_RUN_HEADER, run_config_of

# A checkpoint's optimizer states are valid only with the same values of these keys.
_FIXED_TRAINING_KEYS = frozenset({"optimizer", "lr", "min_lr", "bf16", "fp16"})

_OVERRIDES_HEADER = "# What options of `megatron-fssdp train` changed in the YAML files; --resume keeps it.\n"


@dataclass(frozen=True)
class RunFolder:
    """Output folder of a run and the files in it.

    Attributes:
        path: Path of the folder.
    """

    path: Path

    @property
    def config(self) -> Path:
        """File with the combined settings of the run."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """File with the metrics: one JSON object per iteration, one per line."""
        return self.path / METRICS_FILE

    @property
    def log(self) -> Path:
        """File with the output of all ranks."""
        return self.path / "log.txt"

    def note_stop(self, iteration: int, reason: str) -> None:
        """Write to the log that the ranks ended before the run was complete; pages show it.

        Args:
            iteration: Number of the last complete iteration; 0 if there was none.
            reason: Why they ended, in one line.
        """
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"{STOP_MARK} {iteration}: {reason}\n")

    @property
    def checkpoints(self) -> Path:
        """Folder of Megatron's checkpoints."""
        return self.path / "checkpoints"

    @property
    def overrides(self) -> Path:
        """File with the settings that options changed, in the form of a run's YAML."""
        return self.path / "overrides.yaml"

    def check(self, training: TrainingArguments, resume: bool, overwrite: bool = False) -> None:
        """Refuse a folder that cannot hold a new run, or cannot be resumed.

        Args:
            training: Training settings of the run, which name its iterations and checkpoint folders.
            resume: Whether to continue the run in the folder.
            overwrite: Whether a new run may replace the run in the folder.

        Raises:
            ConfigurationError: The folder already holds a run, or it has no checkpoint to resume from, or the
                run in it is finished.
        """
        refuse_non_folder(self.path, "--out")
        if resume and overwrite:
            raise ConfigurationError(
                "--resume and --overwrite exclude each other: one continues the run in the folder, the other "
                "deletes it; give one of them"
            )
        taken = self.taken()
        checkpoints = training.save or self.checkpoints
        if not resume and not overwrite and taken:
            next_step = (
                "continue it with --resume, replace it with --overwrite"
                if has_checkpoint(checkpoints)
                else "it has no checkpoint to continue from, so replace it with --overwrite"
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

    @property
    def _files_of_a_run(self) -> list[Path]:
        arrays = [self.path / name for name in (LOADS_FILE, PLACEMENTS_FILE)]
        return [
            *(self.config, self.overrides, self.metrics, self.path / EVALUATIONS_FILE),
            *arrays,
            *(self.log, self.checkpoints, self.path / "tensorboard", self.path / "torch_profile"),
        ]

    def taken(self) -> list[str]:
        """Return the names of the files and folders of an earlier run in the folder."""
        return [path.name for path in self._files_of_a_run if path.exists()]

    def delete_run(self) -> None:
        """Delete the files of a run in the folder. Other files stay, for example pages of ``report``.

        Raises:
            ConfigurationError: A file cannot be deleted.
        """
        try:
            for path in self._files_of_a_run:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"--overwrite: {error.filename}: cannot be deleted ({error.strerror}); delete it, or choose "
                "another folder"
            ) from None

    def check_unchanged(self, config: RunConfig) -> None:
        """Refuse to resume with another model or optimizer than the one of the checkpoints.

        Args:
            config: The settings to resume with.

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
        with written_whole(self.path, "--out") as partial:
            (partial / self.config.name).write_text(RECORDED_RUN_HEADER + text, encoding="utf-8")
            (partial / self.overrides.name).write_text(
                _OVERRIDES_HEADER + format_yaml(dict(overrides or {})), encoding="utf-8"
            )


def has_checkpoint(folder: Path) -> bool:
    """Whether a folder has a complete checkpoint."""
    try:
        last_checkpoint(folder, "")
    except ConfigurationError:
        return False
    return True


def last_checkpoint(folder: Path, asked_by: str, instead: str = "start a new run") -> int:
    """Return the iteration of the newest checkpoint in a folder.

    Args:
        folder: Megatron's checkpoint folder.
        asked_by: The option or setting that names the folder. The error message starts with it.
        instead: What the user can do without a checkpoint, for the error message.

    Raises:
        ConfigurationError: The folder has no checkpoint.
    """
    path = folder / "latest_checkpointed_iteration.txt"
    try:
        text = path.read_text(encoding="utf-8").strip()
        return 0 if text == "release" else int(text)
    except (OSError, ValueError):
        raise ConfigurationError(
            f"{asked_by}: no checkpoint in {folder}; give a folder with a checkpoint, or {instead}"
        ) from None
