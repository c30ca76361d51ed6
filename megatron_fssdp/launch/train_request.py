"""The options of ``megatron-fssdp train``, and the settings that follow from them and the YAML files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from megatron_fssdp.config.loading import apply_overrides
from megatron_fssdp.config.run.composition import (
    Composition,
    RunOption,
    changed,
    compose,
    difference,
    lay_over,
    set_options,
    words_option,
)
from megatron_fssdp.config.run.run_config import RunConfig
from megatron_fssdp.launch.run_folder import RunFolder


@dataclass(frozen=True)
class TrainRequest:
    """Options of ``megatron-fssdp train``."""

    config_paths: Sequence[Path]  # YAML files of the run; later files win
    strategy: str | None = None  # name of a strategy that replaces the one in the files
    strategy_overrides: Sequence[str] = ()  # key=value settings of the strategy
    overrides: Sequence[str] = ()  # key=value settings of the whole run, with dotted keys
    nproc: int | None = None  # number of ranks on this machine, if not that of the files
    iterations: int | None = None  # number of training iterations, if not that of the files
    out: Path | None = None  # output folder; default: in runs/, named after the files and the strategy
    megatron_words: Sequence[str] = ()  # settings in the form of Megatron-LM's own arguments
    resume: bool = False  # continue the run in the output folder
    overwrite: bool = False  # move an earlier run in the output folder aside

    def resolve(self) -> RunConfig:
        """Combine files and options into validated settings. A resumed run keeps its earlier options.

        Raises:
            ConfigurationError: A file or an option is invalid.
        """
        return self._composition.with_options(self.options())

    def changed_settings(self) -> dict[str, Any]:
        """The settings that options changed in the files, also earlier options of a resumed run."""
        return difference(self._files.data, changed(self._composition.data, self.options()))

    @cached_property
    def _files(self) -> Composition:
        return compose(self.config_paths)

    @cached_property
    def _composition(self) -> Composition:
        kept = self.folder.overrides
        return self._files.with_file(kept) if self.resume and kept.exists() else self._files

    @cached_property
    def folder(self) -> RunFolder:
        """The output folder of the run."""
        section = changed(self._files.data, self.options()).get("strategy")
        strategy = str(section.get("name", "none") if isinstance(section, Mapping) else "none")
        first, *others = (path.stem for path in self.config_paths)
        names = [first, *(name for name in others if name != strategy), strategy]
        return RunFolder(self.out or Path("runs") / "-".join(names))

    def words(self) -> list[str]:
        """Return the words of the command line that starts this run anew."""
        words = ["megatron-fssdp", "train", *map(str, self.config_paths)]
        for flag, values in (
            ("--moe-strategy", [self.strategy]),
            ("--moe-strategy-set", self.strategy_overrides),
            ("--set", self.overrides),
            ("--nproc", [self.nproc]),
            ("--iters", [self.iterations]),
            ("--out", [self.out]),
        ):
            words += [word for value in values if value is not None for word in (flag, str(value))]
        return [*words, *(["--", *self.megatron_words] if self.megatron_words else [])]

    def options(self) -> list[RunOption]:
        """The options that change the settings of the files, in the order in which they apply."""
        options = set_options(self.overrides)
        if self.nproc is not None:
            value = f"parallelism.nproc_per_node={self.nproc}"
            options += [replace(option, text=f"--nproc {self.nproc}") for option in set_options([value])]
        if self.iterations is not None:
            change = partial(_with_iterations, self.iterations)
            options.append(RunOption(f"--iters {self.iterations}", change))
        if self.strategy is not None:
            strategy = {"strategy": {"name": self.strategy}}
            options.append(RunOption(f"--moe-strategy {self.strategy}", partial(lay_over, high=strategy)))
        options += [
            RunOption(f"--moe-strategy-set {text}", partial(_with_strategy_setting, text))
            for text in self.strategy_overrides
        ]
        return [*options, *([words_option(self.megatron_words)] if self.megatron_words else [])]


def _with_iterations(iterations: int, data: Mapping[str, Any]) -> dict[str, Any]:
    """Set the number of iterations, and let the warm-up of the learning rate end before the last one."""
    result = apply_overrides(data, [f"training.train_iters={iterations}"], "--iters")
    warm_up = result["training"].get("lr_warmup_iters")
    if isinstance(warm_up, int) and warm_up >= iterations > 0:
        result["training"]["lr_warmup_iters"] = iterations - 1
    return result


def _with_strategy_setting(text: str, data: Mapping[str, Any]) -> dict[str, Any]:
    section = data.get("strategy") or {}
    settings = (section.get("settings") or {}) if isinstance(section, dict) else None
    if not isinstance(settings, dict):
        return dict(data)  # validation reports the wrong type
    settings = apply_overrides(settings, [text], "--moe-strategy-set")
    return {**data, "strategy": {**section, "settings": settings}}
