"""The output folder of a training run: its files, and how far the run in it is."""

import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.config.run.sections import TrainingArguments
from megatron_fssdp.config.yaml_text import format_yaml
from megatron_fssdp.files.run_lock import refuse_live
from megatron_fssdp.files.written_files import cannot_write, refuse_non_folder, written_whole
from megatron_fssdp.records.recorded_run import STOP_MARK
from megatron_fssdp.records.run_settings import RECORDED_RUN_HEADER, flat_settings, run_config_of

# A checkpoint's optimizer states are valid only with the same values of these keys, and of all of the model.
_FIXED_KEYS = frozenset(f"training.{key}" for key in ("optimizer", "lr", "min_lr", "bf16", "fp16"))

_FILES_OF_A_RUN = (
    *("config.yaml", "overrides.yaml", "metrics.jsonl", "loads.npy", "placements.npy"),
    *("micro_batch_loads.npy", "log.txt", "checkpoints", "tensorboard", "torch_profile"),
)
_OVERRIDES_HEADER = "# What options of `megatron-fssdp train` changed in the YAML files; --resume keeps it.\n"


class RunFolder:
    """Output folder of a run, and the paths of what is in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"  # the combined settings
        self.overrides = path / "overrides.yaml"  # those of them that options changed
        self.metrics, self.log = path / "metrics.jsonl", path / "log.txt"
        self.checkpoints = path / "checkpoints"

    def taken(self) -> list[str]:
        """Return the names of the files and folders of an earlier run in the folder."""
        return [name for name in _FILES_OF_A_RUN if (self.path / name).exists()]

    def check(self, training: TrainingArguments, resume: bool, overwrite: bool = False) -> None:
        """Raise a ConfigurationError if the folder cannot hold a new run, or its run cannot be resumed."""
        refuse_non_folder(self.path, "--out")
        refuse_live(self.path, "--out")
        own, start = training.save or self.checkpoints, training.load
        saved, problem = saved_iteration(own), ""
        if resume and overwrite:
            problem = "--resume and --overwrite exclude each other; give one of them"
        elif resume and saved is None:
            step = "give a folder with a checkpoint, or start the run again with --overwrite"
            problem = f"--resume: no checkpoint in {own}; {step}"
        elif resume and saved is not None and saved >= training.train_iters:
            done = f"{self.path} has already finished {saved} iterations"
            problem = f"--resume: {done}; ask for more with --iters"
        elif (taken := self.taken()) and not resume and not overwrite:
            step = "continue it with --resume, move it aside with --overwrite"
            if saved is None:
                step = "it has no checkpoint to continue from, so move it aside with --overwrite"
            holds = f"already holds a run ({', '.join(taken)})"
            problem = f"--out {self.path}: {holds}; {step}, or choose another folder"
        elif start is not None and not resume and saved_iteration(start) is None:
            problem = f"training.load: no checkpoint in {start}; give a folder with one, or start a new run"
        if problem:
            raise ConfigurationError(problem)

    def refuse_other(self, config: RunConfig) -> None:
        """Raise a ConfigurationError if the run in the folder has another model or optimizer.

        Its checkpoints belong to them.
        """
        ours, theirs = (
            flat_settings(run.model_dump(mode="json")) for run in (config, run_config_of(self.path))
        )
        for key in {**theirs, **ours}:
            is_fixed = key in _FIXED_KEYS or key.startswith("model.")
            if is_fixed and ours.get(key) != theirs.get(key):
                raise ConfigurationError(
                    f"--resume: {key} is {ours.get(key)}, but {self.path} was started with "
                    f"{theirs.get(key)}; use this value, or start a new run in another folder"
                )

    def move_aside(self) -> Path | None:
        """Rename the folder, if it holds a run, and return its new path; a ConfigurationError if it stays."""
        if not self.taken():
            return None
        place = self.path.resolve()
        aside = place.with_name(f"{place.name}.old-{datetime.now():%Y%m%d-%H%M%S}")
        try:
            os.rename(place, aside)
        except OSError as error:
            raise cannot_write(aside, "--overwrite", error) from None
        return aside

    def create(self, config: RunConfig, overrides: Mapping[str, Any] | None = None) -> None:
        """Create the folder; write the settings, and those that options changed: a resumed run keeps them."""
        texts = {
            self.config: RECORDED_RUN_HEADER + format_yaml(config.model_dump(mode="json")),
            self.overrides: _OVERRIDES_HEADER + format_yaml(dict(overrides or {})),
        }
        with written_whole(self.path, "--out") as partial:
            for path, text in texts.items():
                (partial / path.name).write_text(text, encoding="utf-8")
            for path in texts:  # those of the run that is resumed
                path.unlink(missing_ok=True)

    def note_stop(self, iteration: int, reason: str) -> None:
        """Write to the log that the ranks ended after an iteration (0: before the first); pages show it."""
        # A full disk must not hide the reason.
        with suppress(OSError), self.log.open("a", encoding="utf-8") as log:
            log.write(f"{STOP_MARK} {iteration}: {reason}\n")


def saved_iteration(folder: Path) -> int | None:
    """Return the iteration of the newest complete checkpoint in Megatron's folder; None without one."""
    try:
        text = (folder / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8").strip()
        return 0 if text == "release" else int(text)
    except (OSError, ValueError):
        return None
