"""Combines a run's settings: files, those that they ``include``, and options are layers on each other."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import closest, describe_value, load_yaml, merged, parse_override, validate
from megatron_fssdp.config.run import megatron_options
from megatron_fssdp.config.run.run_config import HOMES, SECTIONS, RunConfig
from megatron_fssdp.config.shipped_files import shipped_run, shipped_runs

INCLUDE_KEY = "include"


class Layer(NamedTuple):
    """What one file itself has, or one option; ``name`` is the file's path, or the option as typed."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Composition:
    """Layers of settings, of which later ones win; ``names`` are the files as the user gave them."""

    names: tuple[str, ...]
    layers: tuple[Layer, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The combined keys and values of all layers."""
        return reduce(lay_over, (layer.settings for layer in self.layers), {})

    def under(self, layers: Iterable[Layer]) -> "Composition":
        """Return these layers with more of them on top."""
        return Composition(self.names, (*self.layers, *layers))

    def validated(self) -> RunConfig:
        """Build the settings, or raise a ConfigurationError that names the layer of each problem."""
        return validate(RunConfig, self.settings, self._source)

    def _source(self, path: tuple[str, ...], text: str) -> str:
        for layer in reversed(self.layers):
            if path and _holds(layer.settings, path):
                return layer.name
        # Values contradict each other: an option that gives one of them is the cause, or else the files.
        options = (layer for layer in self.layers if layer.name.startswith("-"))
        words = set(re.findall(r"\w+", text))
        causes = [option.name for option in options if words.intersection(_names_in(option.settings))]
        return " ".join(causes) or ", ".join(self.names)


def compose(files: Iterable[Path | str]) -> Composition:
    """Read settings files, of which later ones win, and all files that they include.

    Where no file exists, a path is the name of one that comes with the package.
    """
    names = tuple(map(str, files))
    return Composition(names, tuple(layer for name in names for layer in _layers(name, ())))


def load_run(files: Iterable[Path | str], overrides: Iterable[str] = ()) -> RunConfig:
    """Read the validated settings of a run: files (:func:`compose`), then ``key=value`` overrides."""
    return compose(files).under(set_layers(overrides)).validated()


def set_layers(overrides: Iterable[str]) -> list[Layer]:
    """Return the layers of options ``--set key=value``."""
    return [Layer(f"--set {text}", parse_override(text, "--set")) for text in overrides]


def words_layer(words: Sequence[str], below: Mapping[str, Any]) -> Layer:
    """Return the layer of ``-- WORDS``, Megatron's own form; what ``below`` has stays in its section."""
    name = f"-- {' '.join(words)}"
    try:
        given = megatron_options.parsed(words)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from None
    settings: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        given_in = (section for section in SECTIONS if _holds(below, (section, key)))
        home = HOMES.get(key) or next(given_in, megatron_options.section_of(key))
        settings.setdefault(home, {})[key] = value
    return Layer(name, settings)


def lay_over(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Layer one mapping on another (:func:`.merged`); another strategy's name drops the settings below it."""
    section, below = high.get("strategy"), low.get("strategy")
    if isinstance(section, Mapping) and isinstance(below, Mapping):
        name_below = below.get("name", "none")
        if section.get("name", name_below) != name_below:
            low = {**low, "strategy": {}}
    return merged(low, high)


def _layers(name: str, above: tuple[Path, ...]) -> Iterator[Layer]:
    """Yield the layers of a file, from bottom to top. ``above`` is the chain of files that include it."""
    beside = Path(os.path.normpath(above[-1].parent / name)) if above else Path(name)
    file = beside if beside.exists() else shipped_run(name) or beside
    if any(os.path.realpath(parent) == os.path.realpath(file) for parent in above):
        circle = " → ".join(map(str, (*above, file)))
        raise ConfigurationError(
            f"{above[0]}: files include each other in a circle, {circle}; remove one include"
        )
    try:
        if not (file.suffix or file.exists()):
            known = list(shipped_runs())
            close = next((run for run in known if run.endswith(f"/{name}")), closest(name, known))
            hint = f"did you mean '{close}'? " if close else ""
            raise ConfigurationError(
                f"{file}: no such file, and the package has no config of that name; {hint}"
                "`megatron-fssdp configs` lists all names"
            )
        settings = load_yaml(file)
    except ConfigurationError as error:
        raise ConfigurationError(f"{above[-1]}: include: {error}" if above else str(error)) from None
    names = settings.pop(INCLUDE_KEY, [])
    if not isinstance(names, list) or not all(name and isinstance(name, str) for name in names):
        raise ConfigurationError(
            f"{file}: include: got {describe_value(names)}, wanted a list of YAML files, such as [model.yaml]"
        )
    for name in names:
        yield from _layers(name, (*above, file))
    yield Layer(str(file), settings)


def _names_in(settings: Mapping[str, Any]) -> set[str]:
    """Return the names by which a message calls what the sections have: the strategy, or keys."""
    names = {key for keys in settings.values() if isinstance(keys, Mapping) for key in keys}
    return names | {"strategy"} if "strategy" in settings else names


def _holds(settings: Any, path: Sequence[str]) -> bool:
    """Whether a mapping has the key at a path; a list on the way holds all its items."""
    for part in path:
        if not isinstance(settings, Mapping) or part not in settings:
            return isinstance(settings, list)
        settings = settings[part]
    return True
