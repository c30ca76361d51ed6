"""A run's settings from several YAML files: models, strategies and clusters are combined, not copied.

A file says what it is made of by ``include``, a list of files that it lies on top of; the command line takes
several files as well. Whatever is laid on top wins, key by key.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_fssdp.config.errors import ConfigurationError
from megatron_fssdp.config.loading import apply_overrides, describe_value, load_yaml, validate
from megatron_fssdp.config.renamed_settings import is_recorded_run, with_new_spellings
from megatron_fssdp.config.run_config import RunConfig
from megatron_fssdp.config.shipped_files import closest_run, shipped_run

INCLUDE_KEY = "include"
_MOST_FILES = 100
_MOST_LEVELS = 20
_ABSENT = object()


@dataclass(frozen=True)
class Layer:
    """What one file says itself.

    Attributes:
        file: The file.
        data: Its own keys, without ``include``.
    """

    file: Path
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Composition:
    """Files laid over one another.

    Attributes:
        files: Those that were asked for.
        layers: These and all that they include, from the bottom to the top.
    """

    files: tuple[Path, ...]
    layers: tuple[Layer, ...]

    @property
    def data(self) -> dict[str, Any]:
        """What all of them say together."""
        data: dict[str, Any] = {}
        for layer in self.layers:
            data = lay_over(data, layer.data)
        return data

    def validated(self, data: Mapping[str, Any]) -> RunConfig:
        """The run that these files' data describe.

        Args:
            data: As :attr:`data`, perhaps changed since.

        Raises:
            ConfigurationError: One line with every problem and the included file that a wrong value is from.
        """
        source = " + ".join(map(str, self.files))
        return validate(RunConfig, data, source, partial(self._origin, data))

    def _origin(self, data: Mapping[str, Any], key_path: Sequence[str]) -> str | None:
        """The file that gave the value of a key, unless it is the only one asked for."""
        value = _value_at(data, key_path)
        for layer in reversed(self.layers):
            if value is not _ABSENT and _value_at(layer.data, key_path) == value:
                return None if (layer.file,) == self.files else str(layer.file)
        return None


def compose(files: Iterable[Path | str]) -> Composition:
    """Read files and all that they include.

    A path in ``include`` is relative to the folder of the file that it stands in. Where a path leads to no
    file, it is the name of one that comes with the package (``shipped_files.shipped_run``).

    Args:
        files: YAML files; later ones are laid over earlier ones.

    Raises:
        ConfigurationError: A file cannot be read, or includes itself, directly or through others; or there
            are so many that somebody has made a mistake.
    """
    asked = tuple(_asked(Path(file)) for file in files)
    layers: list[Layer] = []
    for file in asked:
        for layer in _layers(file, ()):
            layers.append(layer)
            if len(layers) > _MOST_FILES:
                raise ConfigurationError(
                    f"{file}: it and what it includes are more than {_MOST_FILES} files; include fewer"
                )
    return Composition(asked, tuple(layers))


def load_run(files: Iterable[Path | str], overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run.

    Args:
        files: As for :func:`compose`.
        overrides: ``key=value`` settings that win over all files.

    Raises:
        ConfigurationError: As :func:`compose`, or something in the files is wrong.
    """
    composition = compose(files)
    return composition.validated(apply_overrides(composition.data, overrides))


def lay_over(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Both data, with ``high``'s values where both have a key.

    Mappings are laid over one another key by key; an empty one (``null``) says nothing. A strategy with
    another name has nothing from the one below it: settings belong to their strategy.
    """
    section, below = high.get("strategy"), low.get("strategy")
    if isinstance(section, Mapping) and isinstance(below, Mapping):
        name_below = below.get("name", "none")
        if section.get("name", name_below) != name_below:
            low = {**low, "strategy": {}}
    return _merged(low, high)


def _asked(path: Path) -> Path:
    """The file that a path or a name means."""
    file = path if path.exists() else shipped_run(path) or path
    if file.suffix or file.exists():
        return file
    close = closest_run(path)
    hint = f"did you mean '{close}'? " if close else ""
    raise ConfigurationError(
        f"{path}: no such file, and nothing of that name comes with the package; {hint}"
        "`megatron-fssdp configs` lists what does"
    )


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(low)
    for key, value in high.items():
        below = low.get(key)
        if not isinstance(below, Mapping):
            result[key] = value
        elif isinstance(value, Mapping):
            result[key] = _merged(below, value)
        elif value is not None:
            result[key] = value
    return result


def _layers(file: Path, above: tuple[Path, ...]) -> Iterator[Layer]:
    """A file's layers, from the bottom to the top.

    Args:
        file: The file.
        above: Those by which it was reached, each included by the one before it.
    """
    if len(above) > _MOST_LEVELS:
        raise ConfigurationError(f"{above[0]}: includes go down more than {_MOST_LEVELS} levels; use fewer")
    if any(os.path.realpath(other) == os.path.realpath(file) for other in above):
        circle = " → ".join(map(str, (*above, file)))
        raise ConfigurationError(
            f"{above[0]}: files include each other in a circle, {circle}; drop one include"
        )
    try:
        data = load_yaml(file)
    except ConfigurationError as error:
        raise ConfigurationError(f"{above[-1]}: include: {error}" if above else str(error)) from None
    if is_recorded_run(file):
        data = with_new_spellings(data)
    for name in _included(data, file):
        beside = Path(os.path.normpath(file.parent / name))
        yield from _layers(beside if beside.exists() else shipped_run(name) or beside, (*above, file))
    yield Layer(file, {key: value for key, value in data.items() if key != INCLUDE_KEY})


def _included(data: Mapping[str, Any], file: Path) -> list[str]:
    names = data.get(INCLUDE_KEY, [])
    if not isinstance(names, list):
        raise ConfigurationError(
            f"{file}: include: got {describe_value(names)}, wanted a list of YAML files, as [models/x.yaml]"
        )
    for position, name in enumerate(names):
        if not isinstance(name, str) or not name or "\0" in name:
            raise ConfigurationError(
                f"{file}: include.{position}: got {describe_value(name)}, wanted the path of a YAML file"
            )
    return names


def _value_at(data: Any, key_path: Sequence[str]) -> Any:
    for part in key_path:
        if isinstance(data, Mapping) and part in data:
            data = data[part]
        elif isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        else:
            return _ABSENT
    return data
