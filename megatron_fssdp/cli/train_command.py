"""``megatron-fssdp train``: trains a model as YAML files describe it."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_fssdp.cli.rank_command import RankCommand
from megatron_fssdp.cli.run_folder import RunFolder, has_checkpoint
from megatron_fssdp.config.composition import Composition, compose, lay_over
from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import apply_overrides
from megatron_fssdp.config.megatron_arguments import Installation, TokenizedData, megatron_arguments
from megatron_fssdp.config.run_config import RunConfig
from megatron_fssdp.config.run_options import RunOption, changed, difference, set_options
from megatron_fssdp.config.training_settings import DataSettings
from megatron_fssdp.data.corpus import default_corpus
from megatron_fssdp.data.manifest import DATA_NAME, MANIFEST_FILE, read_manifest
from megatron_fssdp.data.tokenizer import MIN_VOCAB_SIZE
from megatron_fssdp.data.wordpiece import SEP, SPECIAL_TOKENS

_DEVICE_VARIABLE = "MEGATRON_FSSDP_DEVICE"
_DEFAULT_SHARDS = 4


@dataclass(frozen=True)
class TrainRequest:
    """Options of ``megatron-fssdp train``.

    Attributes:
        config_paths: YAML files of the run. Later files win.
        strategy: Name of a strategy that replaces the one in the files, or None.
        strategy_overrides: ``key=value`` settings of the strategy.
        overrides: ``key=value`` settings of the whole run, with dotted keys.
        nproc: Number of ranks on this machine, or None for the number in the files.
        iterations: Number of training iterations, or None for the number in the files.
        out: Output folder. By default a folder in ``runs/`` that is named after the files and the strategy.
        megatron_words: Arguments for Megatron-LM in addition to those of the files.
        resume: Whether to continue the run in the output folder.
        overwrite: Whether to delete an earlier run in the output folder.
    """

    config_paths: Sequence[Path]
    strategy: str | None = None
    strategy_overrides: Sequence[str] = ()
    overrides: Sequence[str] = ()
    nproc: int | None = None
    iterations: int | None = None
    out: Path | None = None
    megatron_words: Sequence[str] = ()
    resume: bool = False
    overwrite: bool = False

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

    def options(self) -> list[RunOption]:
        """The options that change the settings of the files, in the order in which they apply."""
        options = set_options(self.overrides)
        if self.nproc is not None:
            value = f"parallelism.nproc_per_node={self.nproc}"
            options += [replace(option, text=f"--nproc {self.nproc}") for option in set_options([value])]
        if self.iterations is not None:
            options.append(
                RunOption(f"--iters {self.iterations}", partial(_with_iterations, self.iterations))
            )
        if self.strategy is not None:
            strategy = {"strategy": {"name": self.strategy}}
            options.append(RunOption(f"--moe-strategy {self.strategy}", partial(lay_over, high=strategy)))
        options += [
            RunOption(f"--moe-strategy-set {text}", partial(_with_strategy_setting, text))
            for text in self.strategy_overrides
        ]
        if self.megatron_words:
            words = " ".join(self.megatron_words)
            options.append(RunOption(f"-- {words}", partial(_with_megatron_words, self.megatron_words)))
        return options


def _with_iterations(iterations: int, data: Mapping[str, Any]) -> dict[str, Any]:
    """Set the number of iterations, and let the warm-up of the learning rate end before the last one."""
    result = apply_overrides(data, [f"training.iterations={iterations}"], "--iters")
    warm_up = result["training"].get("warmup_iterations")
    if isinstance(warm_up, int) and warm_up >= iterations > 0:
        result["training"]["warmup_iterations"] = iterations - 1
    return result


def _with_strategy_setting(text: str, data: Mapping[str, Any]) -> dict[str, Any]:
    section = data.get("strategy") or {}
    settings = (section.get("settings") or {}) if isinstance(section, dict) else None
    if not isinstance(settings, dict):
        return dict(data)  # validation reports the wrong type
    settings = apply_overrides(settings, [text], "--moe-strategy-set")
    return {**data, "strategy": {**section, "settings": settings}}


def _with_megatron_words(words: Sequence[str], data: Mapping[str, Any]) -> dict[str, Any]:
    before = data.get("megatron_args") or []
    return {**data, "megatron_args": [*before, *words]} if isinstance(before, list) else dict(data)


def dry_run(request: TrainRequest) -> str:
    """Return the exact shell command of a run, without building, writing or starting anything.

    Args:
        request: Options of the run.

    Raises:
        ConfigurationError: The input is invalid, or the folder has no checkpoint to resume from.
    """
    config, folder = request.resolve(), request.folder
    if request.resume:
        folder.check(config.training, resume=True, overwrite=request.overwrite)
    data = _described_data(config, folder.path)
    return _command(config, data, folder.path, request.resume).shell_text()


def train(request: TrainRequest, console: Console) -> int:
    """Train on this machine and show the progress.

    Args:
        request: Options of the run.
        console: Console that shows the progress.

    Returns:
        The exit code of the ranks, 130 after Ctrl-C, or 143 after SIGTERM.

    Raises:
        ConfigurationError: The input is invalid. No rank was started.
    """
    from megatron_fssdp.cli.failure_report import failure_reason
    from megatron_fssdp.cli.rank_processes import exit_code_after, run_ranks
    from megatron_fssdp.cli.training_progress import TrainingProgress

    config = request.resolve()
    if config.parallelism.num_nodes > 1:
        raise ConfigurationError(
            f"parallelism.num_nodes {config.parallelism.num_nodes}: this command starts the ranks of one "
            "machine; use --dry-run and run the printed command on every machine"
        )
    if config.training.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigurationError(
            f"training.tensorboard {config.training.tensorboard}: the package tensorboard is not installed; "
            "install it with `pip install tensorboard`, or set it to false"
        )
    folder, resume = request.folder, request.resume
    folder.check(config.training, resume, request.overwrite)
    if resume:
        folder.check_unchanged(config)
    data = _built_data(config, folder.path, console)
    if data is not None:
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"path": data.prefix.parent})}
        )
    command = _command(config, data, folder.path, resume)
    overrides = request.changed_settings()
    if request.overwrite:
        folder.delete_run()
    folder.create(config, overrides)
    log_start = folder.log.stat().st_size if folder.log.exists() else 0
    console.print(
        f"{folder.path}: strategy {config.strategy.name}, log in {folder.log}",
        highlight=False,
        soft_wrap=True,
    )
    if resume and overrides:
        console.print(
            f"settings of earlier options are kept ({folder.overrides})", highlight=False, soft_wrap=True
        )
    nproc, iterations = config.parallelism.nproc_per_node, config.training.iterations
    try:
        with TrainingProgress(folder.metrics, iterations, nproc, console) as progress:
            code = run_ranks(command, folder.log, progress.update)
    except KeyboardInterrupt as interrupt:
        checkpoints = config.training.checkpoint_dir or folder.checkpoints
        again = (
            "continue with --resume"
            if has_checkpoint(checkpoints)
            else "no checkpoint yet, start again with --overwrite"
        )
        console.print(f"interrupted; all ranks have ended; {again}", highlight=False)
        return exit_code_after(interrupt)
    if code != 0 or progress.last is None:
        reason = failure_reason(folder.log, log_start)
        console.print(
            f"error: training failed: {reason}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        console.print(f"all output: {folder.log}", highlight=False, soft_wrap=True)
        return code if code > 0 else 1
    if progress.last.iteration < iterations:
        console.print(
            "the ranks stopped before the last iteration, as an exit option asked; the reason is in "
            f"{folder.log}",
            highlight=False,
            soft_wrap=True,
        )
    return 0


def _command(config: RunConfig, data: TokenizedData | None, out_dir: Path, resume: bool) -> RankCommand:
    on_cpu = _runs_on_cpu(config.training.device)
    if on_cpu and config.parallelism.context > 1:
        raise ConfigurationError(
            f"parallelism.context {config.parallelism.context} needs Transformer Engine's attention, which "
            "does not run on CPUs; set it to 1 or train on GPUs"
        )
    has_te = importlib.util.find_spec("transformer_engine") is not None
    installation = Installation(on_cpu=on_cpu, has_transformer_engine=has_te)
    return RankCommand(config, megatron_arguments(config, data, installation, out_dir, resume), on_cpu)


def _runs_on_cpu(device: str) -> bool:
    if device != "auto":
        return device == "cpu"
    if asked := os.environ.get(_DEVICE_VARIABLE):
        return asked.lower() == "cpu"
    import torch

    return not torch.cuda.is_available()


def _data_dir(settings: DataSettings, out_dir: Path) -> Path:
    if settings.path is not None:
        return settings.path
    size = "" if settings.tokenizer == "bytes" else f"-{settings.vocab_size}"
    return out_dir.parent / f"data-{settings.tokenizer}{size}"


def _built_data(config: RunConfig, out_dir: Path, console: Console) -> TokenizedData | None:
    """Return the run's data. The default corpus is built first if it does not exist yet."""
    settings = config.data
    if settings.external:
        return None
    folder = _data_dir(settings, out_dir)
    if settings.path is None and not (folder / MANIFEST_FILE).exists():
        from megatron_fssdp.cli.data_command import build_with_progress

        build_with_progress(
            [], folder, settings.tokenizer, settings.vocab_size, _DEFAULT_SHARDS, False, False, console
        )
    return _described_data(config, out_dir)


def _described_data(config: RunConfig, out_dir: Path) -> TokenizedData | None:
    """Return the run's data as it exists, or as the default corpus will be built."""
    settings = config.data
    if settings.external:
        return None
    folder = _data_dir(settings, out_dir)
    if settings.path is None and not (folder / MANIFEST_FILE).exists():
        vocab_size = MIN_VOCAB_SIZE if settings.tokenizer == "bytes" else settings.vocab_size
        eod_id = SPECIAL_TOKENS.index(SEP) if settings.tokenizer == "wordpiece" else vocab_size - 1
        return _tokenized(folder, vocab_size, eod_id, len(default_corpus().files))
    manifest = read_manifest(folder)
    if (manifest.tokenizer == "wordpiece") != (config.model.family == "bert"):
        wanted = "--tokenizer wordpiece" if config.model.family == "bert" else "--tokenizer bpe or bytes"
        raise ConfigurationError(
            f"{folder}: got data built with --tokenizer {manifest.tokenizer}, wanted {wanted} for "
            f"model.family {config.model.family}; build it with `megatron-fssdp data build` and give "
            "its folder as data.path"
        )
    return _tokenized(folder, manifest.vocab_size, manifest.eod_id, manifest.num_documents)


def _tokenized(folder: Path, vocab_size: int, eod_id: int, num_documents: int) -> TokenizedData:
    return TokenizedData(folder / DATA_NAME, vocab_size, eod_id, num_documents, folder / "index_cache")
