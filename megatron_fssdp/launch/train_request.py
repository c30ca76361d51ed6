"""The options of ``megatron-fssdp train``, and the settings that follow from them and the YAML files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_fssdp.config.loading import load_yaml, parse_override
from megatron_fssdp.config.run.composition import Composition, Layer, compose, set_layers, words_layer
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
        """Combine files and options into validated settings. A resumed run keeps its earlier options."""
        return self._files.under(self._options).validated()

    def changed_settings(self) -> dict[str, Any]:
        """The settings that options changed in the files, also earlier options of a resumed run."""
        changed = Composition((), tuple(self._options)).settings
        if "strategy" in changed:  # as a whole: options may have dropped settings of the files
            changed["strategy"] = self._files.under(self._options).settings["strategy"]
        return changed

    @cached_property
    def _files(self) -> Composition:
        return compose(self.config_paths)

    @cached_property
    def folder(self) -> RunFolder:
        """The output folder of the run."""
        section = self._files.under(self._given).settings.get("strategy")
        strategy = str(section.get("name", "none") if isinstance(section, Mapping) else "none")
        first, *others = (path.stem for path in self.config_paths)
        names = [first, *(name for name in others if name != strategy), strategy]
        return RunFolder(self.out or Path("runs") / "-".join(names))

    @cached_property
    def _options(self) -> list[Layer]:
        """What options change in the files, and before it what earlier options of a resumed run changed."""
        kept = self.folder.overrides
        earlier = [Layer(str(kept), load_yaml(kept))] if self.resume and kept.exists() else []
        return [*earlier, *self._given]

    @cached_property
    def _given(self) -> list[Layer]:
        """The options of this command, in the order in which they apply."""
        layers = set_layers(self.overrides)
        if self.nproc is not None:
            layers.append(Layer(f"--nproc {self.nproc}", {"parallelism": {"nproc_per_node": self.nproc}}))
        if self.iterations is not None:
            training = {"train_iters": self.iterations}
            below = self._files.under(layers).settings.get("training")
            warm_up = below.get("lr_warmup_iters") if isinstance(below, Mapping) else None
            if isinstance(warm_up, int) and warm_up >= self.iterations > 0:
                training["lr_warmup_iters"] = self.iterations - 1  # it ends before the last iteration
            layers.append(Layer(f"--iters {self.iterations}", {"training": training}))
        if self.strategy is not None:
            layers.append(Layer(f"--moe-strategy {self.strategy}", {"strategy": {"name": self.strategy}}))
        flag = "--moe-strategy-set"
        for text in self.strategy_overrides:
            settings = parse_override(text, flag)
            layers.append(Layer(f"{flag} {text}", {"strategy": {"settings": settings}}))
        if self.megatron_words:
            layers.append(words_layer(self.megatron_words, self._files.under(layers).settings))
        return layers
