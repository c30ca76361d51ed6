"""The output folder of a training run."""

from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.renamed_settings import RECORDED_RUN_HEADER
from megatron_fssdp.config.run_config import RunConfig
from megatron_fssdp.config.training_settings import TrainingSettings
from megatron_fssdp.config.written_files import written_whole
from megatron_fssdp.config.yaml_text import format_yaml
from megatron_fssdp.reporting.placement_records import PLACEMENTS_FILE
from megatron_fssdp.reporting.recorded_run import run_config_of
from megatron_fssdp.reporting.run_records import LOADS_FILE, METRICS_FILE

# A checkpoint's optimizer states are valid only with the same values of these keys.
_FIXED_TRAINING_KEYS = frozenset({"optimizer", "lr", "min_lr", "precision"})


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

    @property
    def checkpoints(self) -> Path:
        """Folder of Megatron's checkpoints."""
        return self.path / "checkpoints"

    def check(self, training: TrainingSettings, resume: bool) -> None:
        """Refuse a folder that cannot hold a new run, or cannot be resumed.

        Args:
            training: Training settings of the run, which name its iterations and checkpoint folders.
            resume: Whether to continue the run in the folder.

        Raises:
            ConfigurationError: The folder already holds a run, or it has no checkpoint to resume from, or the
                run in it is finished.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigurationError(f"--out {self.path}: is a file, wanted a folder; give another path")
        names = (
            self.config.name,
            METRICS_FILE,
            LOADS_FILE,
            PLACEMENTS_FILE,
            self.log.name,
            self.checkpoints.name,
        )
        taken = [name for name in names if (self.path / name).exists()]
        if not resume and taken:
            raise ConfigurationError(
                f"--out {self.path}: already holds a run ({', '.join(taken)}); continue it with --resume, or "
                "choose another folder"
            )
        if resume:
            done = last_checkpoint(training.checkpoint_dir or self.checkpoints, "--resume")
            if done >= training.iterations:
                raise ConfigurationError(
                    f"--resume: {self.path} has already finished {done} iterations; ask for more with --iters"
                )
        elif training.load_dir is not None:
            last_checkpoint(training.load_dir, "training.load_dir")

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
            for name in type(now).model_fields:
                fixed = section == "model" or name in _FIXED_TRAINING_KEYS
                if fixed and getattr(then, name) != getattr(now, name):
                    raise ConfigurationError(
                        f"--resume: {section}.{name} is {getattr(now, name)}, but {self.path} was started "
                        f"with {getattr(then, name)}; use this value, or start a new run"
                    )

    def create(self, config: RunConfig) -> None:
        """Create the folder and write the settings of the run.

        Raises:
            ConfigurationError: The folder cannot be written.
        """
        text = format_yaml(config.model_dump(mode="json"))
        with written_whole(self.path, "--out") as partial:
            (partial / self.config.name).write_text(RECORDED_RUN_HEADER + text, encoding="utf-8")


def last_checkpoint(folder: Path, asked_by: str) -> int:
    """Return the iteration of the newest checkpoint in a folder.

    Args:
        folder: Megatron's checkpoint folder.
        asked_by: The option or setting that names the folder. The error message starts with it.

    Raises:
        ConfigurationError: The folder has no checkpoint.
    """
    path = folder / "latest_checkpointed_iteration.txt"
    try:
        text = path.read_text(encoding="utf-8").strip()
        return 0 if text == "release" else int(text)
    except (OSError, ValueError):
        raise ConfigurationError(
            f"{asked_by}: no checkpoint in {folder}; give a folder with a checkpoint, or start a new run"
        ) from None
