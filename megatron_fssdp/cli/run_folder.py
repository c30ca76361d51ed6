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

# What a checkpoint's optimizer state belongs to.
_FIXED_TRAINING_KEYS = frozenset({"optimizer", "lr", "min_lr", "precision"})


@dataclass(frozen=True)
class RunFolder:
    """Names of what a run leaves behind.

    Attributes:
        path: The folder.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object an iteration."""
        return self.path / METRICS_FILE

    @property
    def log(self) -> Path:
        """Output of all ranks."""
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        """Megatron's checkpoints."""
        return self.path / "checkpoints"

    def check(self, training: TrainingSettings, resume: bool) -> None:
        """Refuse a folder that does not fit what is wanted.

        Args:
            training: The run's schedule and checkpoint folders.
            resume: Whether a run in it is to go on.

        Raises:
            ConfigurationError: The folder is taken, or has nothing to resume.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigurationError(f"--out {self.path}: is a file; give a folder")
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
                f"--out {self.path}: holds a run already ({', '.join(taken)}); go on with it by --resume, or "
                "choose another folder"
            )
        if resume:
            done = last_checkpoint(training.checkpoint_dir or self.checkpoints, "--resume")
            if done >= training.iterations:
                raise ConfigurationError(
                    f"--resume: {self.path} has finished its {done} iterations; ask for more with --iters"
                )
        elif training.load_dir is not None:
            last_checkpoint(training.load_dir, "training.load_dir")

    def check_unchanged(self, config: RunConfig) -> None:
        """Refuse to resume as another model or with another optimizer than the checkpoints are of.

        Args:
            config: What is asked for now.

        Raises:
            ConfigurationError: It differs from the run's own configuration, or that is damaged.
        """
        before = run_config_of(self.path)
        for section in ("model", "training"):
            then, now = getattr(before, section), getattr(config, section)
            for name in type(now).model_fields:
                fixed = section == "model" or name in _FIXED_TRAINING_KEYS
                if fixed and getattr(then, name) != getattr(now, name):
                    raise ConfigurationError(
                        f"--resume: {section}.{name} is {getattr(now, name)}, but {self.path} was started "
                        f"with {getattr(then, name)}; keep that, or start a new run"
                    )

    def create(self, config: RunConfig) -> None:
        """Make the folder and write the configuration.

        Raises:
            ConfigurationError: It cannot be written.
        """
        text = format_yaml(config.model_dump(mode="json"))
        with written_whole(self.path, "--out") as partial:
            (partial / self.config.name).write_text(RECORDED_RUN_HEADER + text, encoding="utf-8")


def last_checkpoint(folder: Path, asked_by: str) -> int:
    """Iteration of the newest checkpoint in a folder.

    Args:
        folder: Megatron's checkpoint folder.
        asked_by: The setting that names it; starts the message.

    Raises:
        ConfigurationError: There is none.
    """
    path = folder / "latest_checkpointed_iteration.txt"
    try:
        text = path.read_text(encoding="utf-8").strip()
        return 0 if text == "release" else int(text)
    except (OSError, ValueError):
        raise ConfigurationError(
            f"{asked_by}: no checkpoint in {folder}; give the folder of one, or start a new run"
        ) from None
